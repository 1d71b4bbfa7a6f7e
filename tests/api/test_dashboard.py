"""The dashboard's files, and what they do not tell."""

import re
from importlib import resources

from helpers_bridge import PlayedBridge, played

from kvasir_peer.api import dashboard, guards


async def test_the_page_is_closed_to_everything_from_elsewhere():
    async with played(PlayedBridge()) as server:
        answers = [await server.get(path) for path in ("/", *(f"/static/{name}" for name in dashboard.FILES))]
    for answer in answers:
        assert answer.status_code == 200
        policy = dict(
            part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";")
        )
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert policy["frame-ancestors"] == "'none'"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert re.findall(r"(?:https?:)?//[a-z]", answer.text.replace("http://www.w3.org/2000/svg", "")) == []
    assert answers[0].text.startswith("<!doctype html>")
    assert not re.search(r"<script(?![^>]* src=)|<style|\son\w+=|\sstyle=", answers[0].text)


async def test_files_are_asked_for_again_and_sent_only_when_they_are_new():
    async with played(PlayedBridge()) as server:
        first = await server.get("/static/dashboard.css")
        again = await server.get("/static/dashboard.css", headers={"if-none-match": first.headers["etag"]})
        missing = await server.get("/static/..%2fmetrics.py")
    assert first.headers["content-type"] == "text/css; charset=utf-8"
    assert (again.status_code, again.content) == (304, b"")
    assert missing.status_code == 404


async def test_how_to_join_holds_no_secret():
    async with played(PlayedBridge()) as server:
        answer = await server.get("/api/join")
    assert answer.json() == {
        "swarm": "kvasir",
        "roles": ["volunteer", "stage"],
        "expires": 4_000_000_000,
        "relays": 1,
    }


def test_every_file_is_served_and_open():
    folder = resources.files("kvasir_peer.api").joinpath("static")
    assert {file.name for file in folder.iterdir()} == set(dashboard.FILES)
    needed = {"/" if name == dashboard.PAGE else f"/static/{name}" for name in dashboard.FILES}
    assert needed <= guards.OPEN_PATHS
    assert guards.OPEN_PATHS - needed == {"/health"}
