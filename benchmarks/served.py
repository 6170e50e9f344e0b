"""A worker process that answers requests, and the class that asks it. Each request and each answer is a line of
JSON."""

import json
import os
import subprocess
import threading


class Served:
    """Starts a worker process and asks it. `ask` ends the process if no answer comes within `limit` seconds."""

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
    """Answer each request [name of a method, *arguments] with the result of that method of `worker`. Answers go to the
    standard output; what anything else prints there afterwards goes to the standard error."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # so that a library's output is not taken for an answer
    for line in requests:
        what, *arguments = json.loads(line)
        try:
            answer = {"ok": getattr(worker, what)(*arguments)}
        except Exception as error:  # a missing op, argument or library is an answer, too
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers)
