"""A process that answers requests, a line of JSON each, and the side that asks it."""

import json
import os
import subprocess
import threading


class Served:
    """The asking side. An answer that does not come in `limit` seconds ends the process."""

    def __init__(self, name, command, **options):
        self.name, self.ended = name, False
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, **pipes, **options)

    def ask(self, *request, limit=None):
        timer = threading.Timer(limit, self.process.kill) if limit else None
        try:
            if timer:
                timer.start()
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            if timer:
                timer.cancel()
        answer = json.loads(line or '{"error": "the process ended"}')
        self.ended = not line
        if "error" in answer:
            raise RuntimeError(f"{self.name} {' '.join(map(str, request))}: {answer['error']}")
        return answer["ok"]

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def serve(worker, requests):
    """Answer requests (name of a method, its arguments) by `worker`, to what is now the standard output."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a library prints must not be taken for an answer
    for line in requests:
        what, *arguments = json.loads(line)
        try:
            answer = {"ok": getattr(worker, what)(*arguments)}
        except Exception as error:  # an op, an argument or a library that is not there
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers)
