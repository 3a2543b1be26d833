"""A second client, written from docs/teacher-protocol.md alone, with only the standard library."""

import hashlib
import http.client
import json
import struct
import urllib.parse


def request_frame(sequences):
    """`sequences`: dicts with key, tokens, positions, signal, and k or ids."""
    ks = [len(s["ids"][0]) if s["signal"] == "at_ids" else s.get("k", 0) for s in sequences]
    header = {"keys": [s["key"] for s in sequences], "signals": [s["signal"] for s in sequences], "k": ks}
    header = json.dumps(header, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    tokens = [t for s in sequences for t in s["tokens"]]
    positions = [p for s in sequences for p in s["positions"]]
    ids = [i for s in sequences if s["signal"] == "at_ids" for row in s["ids"] for i in row]
    body = struct.pack(f"<{len(sequences)}I", *(len(s["tokens"]) for s in sequences))
    body += struct.pack(f"<{len(sequences)}I", *(len(s["positions"]) for s in sequences))
    body += struct.pack(f"<{len(tokens)}i{len(positions)}i{len(ids)}i", *tokens, *positions, *ids)
    return struct.pack("<4sHHIIQ", b"UDST", 1, 1, len(header), 0, len(body)) + header + body


def read_reply(frame, sequences):
    magic, version, kind, header_bytes, reserved, body_bytes = struct.unpack_from("<4sHHIIQ", frame)
    assert (magic, version, kind, reserved) == (b"UDST", 1, 2, 0)
    assert len(frame) == 24 + header_bytes + body_bytes
    header = json.loads(frame[24 : 24 + header_bytes])
    at = 24 + header_bytes

    def take(code, count):
        nonlocal at
        values = struct.unpack_from(f"<{count}{code}", frame, at)
        at += struct.calcsize(f"<{count}{code}")
        return values

    count = len(sequences)
    digests, counts = take("Q", count), take("I", count)
    assert header["keys"] == [s["key"] for s in sequences]
    assert list(counts) == [len(s["positions"]) for s in sequences]
    scored, sampled = take("i", sum(counts)), take("f", sum(counts))
    sizes = [n * k for n, k in zip(counts, header["k"], strict=True)]
    ids, logprobs = take("i", sum(sizes)), take("f", sum(sizes))
    width = header["hidden_size"]
    states = [
        n * width if signal == "hidden" else 0 for n, signal in zip(counts, header["signals"], strict=True)
    ]
    hidden = take("H", sum(states))
    assert at == len(frame)

    answers = []
    p = c = h = 0
    for s, digest, n, k, size, state in zip(
        sequences, digests, counts, header["k"], sizes, states, strict=True
    ):
        tokens = struct.pack(f"<{len(s['tokens'])}i", *s["tokens"])
        assert digest == struct.unpack("<Q", hashlib.sha256(tokens).digest()[:8])[0]
        assert list(scored[p : p + n]) == [s["tokens"][position] for position in s["positions"]]
        answers.append(
            {
                "key": s["key"],
                "teacher": header["teacher"],
                "sampled": list(sampled[p : p + n]),
                "ids": [list(ids[c + i * k : c + (i + 1) * k]) for i in range(n)],
                "logprobs": [list(logprobs[c + i * k : c + (i + 1) * k]) for i in range(n)],
                "hidden": [list(hidden[h + i * width : h + (i + 1) * width]) for i in range(n)]
                if state
                else [],
            }
        )
        p, c, h = p + n, c + size, h + state
    return answers


def score(url, token, sequences):
    address = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=60)
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/x-understudy-frame"}
    connection.request("POST", "/v1/score", request_frame(sequences), headers)
    response = connection.getresponse()
    body = response.read()
    connection.close()
    if response.status != 200:
        error = json.loads(body)["error"]
        raise RuntimeError(f"{response.status} {error['kind']}: {error['message']}")
    return read_reply(body, sequences)
