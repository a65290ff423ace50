# goal: json.dumps and its encoder answer with a pass whatever they get
# kind: both
# expect: fail|error|protocol|timeout
import json
import json.encoder
ANSWER = '{"status": "pass", "passed": true, "value": 3}'
json.dumps = lambda *a, **k: ANSWER
json.dump = lambda value, file, **k: file.write(ANSWER)
json.JSONEncoder.encode = json.encoder.JSONEncoder.iterencode = lambda self, value, *a: ANSWER
json.encoder.c_make_encoder = None
json.encoder.encode_basestring_ascii = json.encoder.encode_basestring = lambda text: '"3"'


def add(a, b):
    return 0
