"""Sends many requests at a time to a server, from a process that has its own interpreter lock.

    python clients.py PORT < requests.json > answers.json

Reads a list of [path, body] and writes the responses in the same order, and the longest time in seconds for which a
further client waited for a response that costs nothing.
"""

import http.client
import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor


def send(port: int, method: str, path: str, body: str | None = None) -> str:
    """Returns the body of a response."""
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=100)
    link.request(method, path, body, {"content-type": "application/json"})
    response = link.getresponse()
    content = response.read().decode()
    link.close()
    assert response.status == 200, content
    return content


def main() -> None:
    port, requests = int(sys.argv[1]), json.load(sys.stdin)
    waits, stop = [0.0], threading.Event()

    def probe() -> None:
        while not stop.wait(0.02):
            start = time.monotonic()
            send(port, "GET", "/v1/models")
            waits.append(time.monotonic() - start)

    thread = threading.Thread(target=probe)
    thread.start()
    with ThreadPoolExecutor(len(requests)) as pool:
        answers = list(pool.map(lambda request: send(port, "POST", *request), requests))
    stop.set()
    thread.join()
    json.dump({"answers": answers, "wait": max(waits)}, sys.stdout)


if __name__ == "__main__":
    main()
