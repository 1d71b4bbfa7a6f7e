"""A peer for tests in network namespaces: serves echo links, or opens one and says over which path it runs.

nat_peer.py RELAY serve
nat_peer.py RELAY PEER     a line of JSON for each change of the path, while numbered frames go there and back
"""

from __future__ import annotations

import json
import secrets
import sys

import trio

from kvasir_peer.net.link import Link
from kvasir_peer.net.node import Node

ECHO = "/kvasir/test/echo/1"


async def serve(link: Link) -> None:
    while True:
        await link.send(await link.receive())


async def main(relay: str, what: str) -> None:
    async with Node.open(secrets.token_bytes(32), relays=[relay], listen=["/ip4/0.0.0.0/tcp/4001"]) as node:
        await node.relays_ready(20)
        node.handle(ECHO, 100_000, serve)
        if what == "serve":
            print(json.dumps({"peer": node.peer_id}), flush=True)
            await trio.sleep_forever()
        link = await node.open_link(what, ECHO)
        path, number = "", 0
        while True:
            frame = number.to_bytes(8, "big") + bytes(20_000)
            await link.send(frame)
            if bytes(await link.receive()) != frame:
                print(json.dumps({"lost": number}), flush=True)
                return
            number += 1
            if link.path != path:
                path = link.path
                print(json.dumps({"path": path, "frames": number}), flush=True)
            await trio.sleep(0.02)


if __name__ == "__main__":
    trio.run(main, *sys.argv[1:])
