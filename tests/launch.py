"""
Scripts started as commands, fast: on Linux the test process, which has torch loaded already, forks, and the child runs
the script as `python SCRIPT ARGS` would, with files for its output. Exit codes, signals and kill -9 are real; only the
five seconds of imports are saved. With a GPU in use (which no fork survives) or elsewhere it is a plain subprocess.
"""
import io
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import matplotlib
import torch
from helpers import ROOT, script_env
from transformers import AutoTokenizer  # noqa: F401  (loaded before the fork, like all that takes seconds)

matplotlib.use("Agg")
import matplotlib.pyplot  # noqa: E402, F401

OUTPUTS = tempfile.TemporaryDirectory(prefix="nanopost-test-")   # removed when the tests end
FORK = sys.platform == "linux" and not torch.cuda.is_available()


class Child:
    """A running script: pid, out and err (files), wait(), kill(signal)."""

    def __init__(self, script, args, cwd=ROOT, env=None):
        """script: a path below the project, or an absolute one."""
        self.script, self.args = Path(ROOT) / script, [str(a) for a in args]
        folder = Path(tempfile.mkdtemp(dir=OUTPUTS.name))
        self.out, self.err = folder / "out", folder / "err"
        self.out.touch()
        self.err.touch()
        env = script_env(**(env or {}))
        if FORK:
            sys.stdout.flush()
            sys.stderr.flush()
            self.process, self.pid = None, os.fork()
            if self.pid == 0:
                self.be_the_script(cwd, env)
        else:
            with open(self.out, "wb") as out, open(self.err, "wb") as err:
                self.process = subprocess.Popen([sys.executable, str(self.script), *self.args], cwd=cwd, stdout=out,
                                                stderr=err, stdin=subprocess.DEVNULL, env=env,
                                                preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL))
            self.pid = self.process.pid

    def be_the_script(self, cwd, env):
        code = 99
        try:
            for number, path in [(1, self.out), (2, self.err)]:
                os.dup2(os.open(path, os.O_WRONLY), number)
            sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), write_through=True)
            sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), write_through=True)
            sys.excepthook = sys.__excepthook__
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGHUP, signal.SIG_DFL)   # the tests may run under nohup
            os.chdir(cwd)
            os.environ.clear()
            os.environ.update(env)
            sys.argv = [str(self.script), *self.args]
            if self.script.parent != ROOT:   # a copied project brings its own modules
                for name in [n for n, m in sys.modules.items()
                             if str(getattr(m, "__file__", "")).startswith(str(ROOT) + os.sep)]:
                    if Path(sys.modules[name].__file__).parent == ROOT:
                        del sys.modules[name]
            sys.path.insert(0, str(self.script.parent))
            extra = env.get("PYTHONPATH")
            sys.path[1:1] = extra.split(os.pathsep) if extra else []
            try:
                runpy.run_path(str(self.script), run_name="__main__")
                code = 0
            except SystemExit as e:
                if e.code is not None and not isinstance(e.code, int):
                    print(e.code, file=sys.stderr)
                code = 0 if e.code is None else e.code if isinstance(e.code, int) else 1
            except BaseException:
                code = 130 if isinstance(sys.exc_info()[1], KeyboardInterrupt) else 1
                sys.excepthook(*sys.exc_info())
            sys.stdout.flush()
        finally:
            os._exit(code)

    def poll(self):
        """-> the exit code (negative: killed by that signal), or None while it runs."""
        if self.process:
            return self.process.poll()
        if not hasattr(self, "code"):
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid == 0:
                return None
            self.code = os.waitstatus_to_exitcode(status)
        return self.code

    def wait(self, timeout=120):
        end = time.time() + timeout
        while self.poll() is None:
            if time.time() > end:
                self.kill(signal.SIGKILL)
                raise AssertionError(f"{self.script.name} {' '.join(self.args)} ran longer than {timeout} s:\n"
                                     + self.out.read_text()[-2000:])
            time.sleep(0.01)
        return SimpleNamespace(returncode=self.poll(), stdout=self.out.read_text(errors="replace"),
                               stderr=self.err.read_text(errors="replace"))

    def kill(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def until(self, condition, timeout=120):
        """Waits until condition() holds; the script must not end before it does."""
        end = time.time() + timeout
        while not condition():
            assert self.poll() is None, f"ended early with {self.poll()}:\n" + self.err.read_text()[-2000:]
            assert time.time() < end, f"waited {timeout} s in vain"
            time.sleep(0.002)


def start(script, *args, **how):
    return Child(script, args, **how)


def run(script, *args, timeout=120, **how):
    """-> returncode, stdout, stderr."""
    return Child(script, args, **how).wait(timeout)


def refused(result, *words, code=2):
    """Asserts that a command ended with `code` and one line on stderr that holds all the words."""
    assert result.returncode == code, (result.returncode, result.stderr[-2000:], result.stdout[-500:])
    assert len(result.stderr.splitlines()) == 1, result.stderr
    for word in words:
        assert str(word) in result.stderr, (word, result.stderr)


def metrics(folder):
    """metrics.jsonl without the fields that hold times."""
    rows = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().split("\n") if line]
    return [{k: v for k, v in row.items() if not k.endswith("_s")} for row in rows]


def jsonl(path):
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").split("\n") if line]


def weights(folder):
    """The bytes of a run's last checkpoint."""
    return (Path(folder) / "checkpoint" / "model.safetensors").read_bytes()
