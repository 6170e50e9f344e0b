"""A worker without torch, run as `scripted_worker.py LOG`. For each op it does what the op's name says: dies, hangs,
..."""

import json
import os
import signal
import sys
import time

print("from sitecustomize, whoever prints there", 3, "null", '{"a": 1}', sep="\n", flush=True)
with open(sys.argv[1], "a") as log:
    log.write(f"{os.getpid()}\n")


def say(op, check, state, **more):
    print(json.dumps({"op": op, "check": check, "state": state, **more}), flush=True)


for line in sys.stdin:
    op = line.strip()
    say(op, "value", "begun")
    say(op, "value", "passed", seconds=0.5, samples=3)
    say(op, "layouts", "begun")
    if op.startswith("segfault"):
        os.kill(os.getpid(), signal.SIGSEGV)
    elif op == "abort":
        print("terminate called after throwing", file=sys.stderr)
        os.abort()
    elif op == "leave":
        sys.exit(3)
    elif op == "leave quietly":
        os._exit(0)
    elif op == "out of memory":  # the host runs out of memory: its kernel kills the process
        os.kill(os.getpid(), signal.SIGKILL)
    elif op == "what":
        print("  what():  CUDA error: misaligned address", "Compile with DSA", "frame #0", sep="\n", file=sys.stderr)
        os.abort()
    elif op == "hang":
        time.sleep(600)
    elif op == "wrong":
        say(op, "layouts", "failed", why="1 of 4 wrong", alive=True)
        continue
    elif op == "illegal":
        say(op, "layouts", "failed", why="an illegal memory access", alive=False)
        sys.exit(13)
    elif op == "memory":
        say(op, "layouts", "memory", why="2 GiB wanted", alive=True)
        continue
    say(op, "layouts", "passed", seconds=0.1, samples=2)
    say(op, None, "done")
