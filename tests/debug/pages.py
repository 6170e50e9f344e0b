"""Helpers for the tests of trace's page: they read its data, and open it in a browser."""

import base64
import json
import re
import shutil
import subprocess
import zlib

import pytest
import torch

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="needs chromium")
# The browser may run as root, without a GPU, and must not look for updates.
FLAGS = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
FLAGS += " --disable-component-update --disable-sync --hide-scrollbars --enable-logging=stderr"


def data(file):
    """Returns the page's data. data["planes"] is unpacked: {quantity: tensor (2, rows, columns)}."""
    page = file.read_text(encoding="utf-8")
    result = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])
    shape = (2, len(result["rows"]), result["columns"])
    result["planes"] = {name: unpack(plane).view(shape) for name, plane in result["planes"].items()}
    return result


def unpack(text):
    raw = bytearray(zlib.decompress(base64.b64decode(text)))
    if not raw:
        return torch.zeros(0)
    return torch.frombuffer(raw, dtype=torch.uint8).view(4, -1).T.contiguous().view(torch.float32).flatten()


def look(file, folder, script="", size="1280,900"):
    """Opens the page, waits until it is ready, and runs `script` (which may await) in it. Returns (DOM, messages of the
    console)."""
    probe = f"""<script>
    (async () => {{
      while (!document.body.dataset.ready) await new Promise(resolve => setTimeout(resolve, 20));
      const probe = document.body.appendChild(document.createElement("pre"));
      const say = text => probe.textContent += text + "\\n";
      {script}
      probe.id = "probe";
    }})();
    </script></html>"""
    copy = folder / "probed.html"
    copy.write_text(file.read_text(encoding="utf-8").replace("</html>", probe), encoding="utf-8")
    command = [BROWSER, *FLAGS.split(), f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=20000"]
    command += [f"--window-size={size}", "--dump-dom", copy.as_uri()]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    said = re.findall(r'CONSOLE[^"]*"(.*)"', run.stderr)
    assert 'id="probe"' in run.stdout, (said, run.stderr[-2000:], run.stdout[-2000:])
    return run.stdout, said
