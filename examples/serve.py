"""Starts `ligerzoo serve` on a free port, and asks it as any client of OpenAI's API does.

python examples/serve.py                             # the package's small Llama; needs pip install ligerzoo[serve]
python examples/serve.py meta-llama/Llama-3.2-1B
"""

import json
import subprocess
import sys
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parent.parent


def ask(url: str, **request: object) -> str:
    """Returns the continuation of a prompt."""
    headers = {"Content-Type": "application/json"}
    call = urllib.request.Request(f"{url}/completions", json.dumps(request).encode(), headers)
    with urllib.request.urlopen(call) as response:
        text: str = json.load(response)["choices"][0]["text"]
        return text


def main(checkpoint: str = str(ROOT / "ligerzoo/demo/assets/tiny-python-llama")) -> None:
    command = [sys.executable, "-m", "ligerzoo", "serve", checkpoint, "--port", "0", "--name", "example"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            line = server.stdout.readline()  # "example at http://127.0.0.1:40000/v1. Ctrl-C stops the server."
            url = line.partition(" at ")[2].partition(". ")[0]
            print(line, end="")
            for prompt in ("def add(a, b):\n    return", "import"):
                print(prompt + ask(url, model="example", prompt=prompt, max_tokens=10, temperature=0))
        finally:
            server.terminate()


if __name__ == "__main__":
    main(*sys.argv[1:])
