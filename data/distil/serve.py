"""A model folder behind the OpenAI chat API, the smallest that prepare.py and other clients can ask: a teacher of ours.

    python data/distil/serve.py --model data/tiny --port 8008

POST /v1/chat/completions takes model, messages, temperature, max_tokens, n, seed, stop; GET /v1/models names the model.
The prompt is the chat template's, as in every script. Requests that wait together, with one temperature, n and stop,
are one call of the engine; those that come during a call wait for the next. A request with a seed gets the same samples
in any company. Left out on purpose: streaming, other samplers (top_p and the rest must have their neutral value),
log-probs, keys. It listens on this machine alone unless --host says otherwise.
First line to expect: `serving data/tiny at http://127.0.0.1:8008/v1`.
"""
import hashlib
import json
import queue
import secrets
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import common  # noqa: E402  (the path above comes first)
from common import UserError, number  # noqa: E402
from engine import Engine  # noqa: E402
from model import find_folder, load_model  # noqa: E402

READ = ("model", "messages", "temperature", "max_tokens", "max_completion_tokens", "n", "seed", "stop")
NEUTRAL = {"stream": False, "top_p": 1, "frequency_penalty": 0, "presence_penalty": 0, "logprobs": False}
TOGETHER = 0.01   # seconds in which requests still join a call


def get_args(argv=None):
    p = common.Parser(description=__doc__.split("\n\n")[0])
    p.add_argument("--model", default="data/tiny", help="folder in Hugging Face format, or a hub id like org/name")
    p.add_argument("--name", default=None, help="the model's name for clients (default: what --model says)")
    p.add_argument("--template", default=None, help="file with a chat template in jinja (default: the tokenizer's)")
    p.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 lets other machines in")
    p.add_argument("--port", type=number(int, 0, 65535), default=8008, help="0: one that is free")
    p.add_argument("--slots", type=number(int, 1), default=64, help="sequences decoded at once")
    p.add_argument("--device", default="auto", help="cuda, mps, cpu, or auto: the first that is there")
    p.add_argument("--precision", default="auto", choices=["auto", "fp32", "bf16"],
                   help="dtype of the products (auto: bf16 on cuda, fp32 elsewhere)")
    args = p.parse_args(argv)
    for name in ("model", "name", "host"):
        if getattr(args, name) == "":   # a shell variable that was not set; an empty host is every address there is
            p.error(f"--{name} is empty")
    return args


# ----------------------------------------------------------------------------------------------------------------------
# Requests

class Refused(Exception):
    """A request that is not served: HTTP status and a sentence."""

    def __init__(self, status, text):
        super().__init__(text)
        self.status = status


def read_request(body, name, tokenizer, context):
    """A request's JSON -> {"prompt" ids, "n", "max_new", "temperature", "seed", "stop"}, or Refused."""
    try:
        r = json.loads(body)
        if not isinstance(r, dict):
            raise ValueError("not an object")
        common.check_messages(r.get("messages"), "messages")
    except (ValueError, RecursionError) as e:
        raise Refused(400, f"the request is not what is expected: {e}") from None
    r = {k: v for k, v in r.items() if v is not None}
    if r.get("model") != name:
        raise Refused(404, f"the model {r.get('model')!r} does not exist; this server has {name!r}")
    for key, value in r.items():
        if key not in READ and key != "user" and (key not in NEUTRAL or value != NEUTRAL[key]):
            raise Refused(400, f"{key} = {value!r} is not supported: the whole distribution is sampled, at temperature")
    stop = r.get("stop", [])
    stop = [stop] if isinstance(stop, str) else stop
    asked = r.get("max_completion_tokens", r.get("max_tokens"))
    for key, value, low, high in [("max_tokens", asked, 1, 2 ** 31), ("n", r.get("n"), 1, 128),
                                  ("seed", r.get("seed"), -2 ** 63, 2 ** 63)]:
        if value is not None and (type(value) is not int or not low <= value <= high):
            raise Refused(400, f"{key} must be a whole number from {low} to {high}, got {value!r}")
    temperature = r.get("temperature", 1.0)
    if type(temperature) not in (int, float) or not (temperature == 0 or 1e-6 <= temperature < 1e3):
        raise Refused(400, f"temperature must be 0 or a number from 1e-6 to 1000, got {temperature!r}")
    if not isinstance(stop, list) or not all(isinstance(s, str) and s for s in stop):
        raise Refused(400, f"stop must be a text or a list of texts, got {stop!r}")
    try:
        prompt = common.encode_prompt(tokenizer, r["messages"])
    except UserError as e:
        raise Refused(400, str(e)) from None
    room = context - len(prompt)
    if room < 1:
        raise Refused(400, f"the prompt has {len(prompt)} tokens, the model's context is {context}")
    return {"prompt": prompt, "n": r.get("n", 1), "max_new": room if asked is None else min(asked, room),
            "temperature": float(temperature), "seed": r.get("seed", secrets.randbits(62)), "stop": tuple(stop)}


def identity(job):
    """A request as one number: what the random draws of its samples hang on, whoever shares the call."""
    return int.from_bytes(hashlib.sha256(repr((job["seed"], job["prompt"])).encode()).digest()[:7], "little")


# ----------------------------------------------------------------------------------------------------------------------
# The one thread that uses the engine

def answer(engine, tokenizer, jobs):
    """One engine call for requests of one temperature, n and stop; leaves "choices" and "usage" in each."""
    first, n = jobs[0], jobs[0]["n"]
    out = engine.generate([j["prompt"] for j in jobs], n, max_new=[j["max_new"] for j in jobs for _ in range(n)],
                          temperature=first["temperature"] or 1.0, greedy=first["temperature"] == 0, stop=first["stop"],
                          prompt_ids=[identity(j) for j in jobs])
    for i, job in enumerate(jobs):
        choices, sampled = [], 0
        for k in range(n):
            b = i * n + k
            ids = out.ids[b, :out.length[b]][out.mask[b, :out.length[b]]]
            text = tokenizer.decode(ids, skip_special_tokens=True)
            found = [text.index(s) for s in job["stop"] if s in text]   # the API cuts before the stop string
            choices.append({"index": k, "message": {"role": "assistant", "content": text[:min(found, default=None)]},
                            "finish_reason": "length" if out.finish[b] == "length" else "stop"})
            sampled += len(ids)
        job["choices"] = choices
        job["usage"] = {"prompt_tokens": len(job["prompt"]), "completion_tokens": sampled,
                        "total_tokens": len(job["prompt"]) + sampled}


def serve_jobs(engine, tokenizer, waiting):
    """For ever: takes what waits together and answers it, group by group."""
    while True:
        jobs = [waiting.get()]
        time.sleep(TOGETHER)
        while not waiting.empty():
            jobs.append(waiting.get())
        groups = {}
        for job in jobs:
            groups.setdefault((job["temperature"], job["n"], job["stop"]), []).append(job)
        for group in groups.values():
            began = time.time()
            try:
                answer(engine, tokenizer, group)
            except Exception as e:   # whatever it is, those who wait must hear of it, and the next call may go well
                for job in group:
                    job["error"] = f"{type(e).__name__}: {' '.join(str(e).split())[:300]}"
                print(group[0]["error"], file=sys.stderr, flush=True)
            else:
                tokens = sum(job["usage"]["completion_tokens"] for job in group)
                print(f"{len(group)} requests  {tokens} tokens  {time.time() - began:.2f} s", flush=True)
            for job in group:
                job["done"].set()


def make_handler(name, tokenizer, context, waiting):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 600   # of an idle connection, seconds

        def reply(self, status, obj):
            body = json.dumps(obj).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def refuse(self, status, text):
            self.reply(status, {"error": {"message": text, "type": "invalid_request_error" if status < 500 else
                                          "server_error", "code": status}})

        def do_GET(self):
            if self.path.rstrip("/") == "/v1/models":
                return self.reply(200, {"object": "list", "data": [{"id": name, "object": "model", "owned_by": "you"}]})
            self.refuse(404, f"{self.path}: there is /v1/models and /v1/chat/completions")

        def do_POST(self):
            size = self.headers.get("Content-Length", "")
            if not size.isdecimal() or int(size) > 1 << 24:
                self.close_connection = True   # the body stays unread, so nothing can follow it
                return self.refuse(400, "a request needs a Content-Length of at most 16 MiB")
            body = self.rfile.read(int(size))
            if self.path.rstrip("/") != "/v1/chat/completions":
                return self.refuse(404, f"{self.path}: there is /v1/models and /v1/chat/completions")
            try:
                job = read_request(body, name, tokenizer, context)
            except Refused as e:
                return self.refuse(e.status, str(e))
            job["done"] = threading.Event()
            waiting.put(job)
            job["done"].wait()
            if "error" in job:
                return self.refuse(500, job["error"])
            self.reply(200, {"id": f"chatcmpl-{secrets.token_hex(8)}", "object": "chat.completion", "model": name,
                             "created": int(time.time()), "choices": job["choices"], "usage": job["usage"]})

        def log_message(self, *_):   # a line a call is printed by the engine's thread
            pass
    return Handler


class Server(ThreadingHTTPServer):
    daemon_threads, request_queue_size = True, 512

    def handle_error(self, request, client_address):
        if not isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError)):   # a client that went away is no fault
            super().handle_error(request, client_address)


if __name__ == "__main__":
    common.fail_in_one_line()
    args = get_args()
    device, folder = common.pick_device(args.device), find_folder(args.model)
    tokenizer = common.load_tokenizer(folder, args.template)
    model = load_model(folder, device=device, compute_dtype=common.pick_precision(args.precision, device))
    engine, waiting, name = Engine(model, tokenizer, slots=args.slots), queue.Queue(), args.name or args.model
    try:
        server = Server((args.host, args.port), make_handler(name, tokenizer, model.config.max_position_embeddings,
                                                             waiting))
    except OSError as e:
        raise UserError(f"--host {args.host} --port {args.port}: cannot listen there ({e.strerror})") from e
    threading.Thread(target=serve_jobs, args=(engine, tokenizer, waiting), daemon=True).start()
    print(f"serving {name} at http://{args.host}:{server.server_address[1]}/v1", flush=True)
    server.serve_forever()
