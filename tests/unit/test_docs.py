"""The documentation speaks of things that exist."""

import re

import pytest
from helpers_unit import ROOT

from kvasir_peer import cli, settings

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)")
PATH = re.compile(r"`((?:kvasir_peer|relay|tests|packaging|bench|docs)/[\w./-]*)`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_paths_lead_somewhere(page):
    text = page.read_text()
    missing = [
        target
        for target, _ in LINK.findall(text)
        if not target.startswith(("http://", "https://", "mailto:")) and not (page.parent / target).exists()
    ]
    missing += [path for path in PATH.findall(text) if not (ROOT / path).exists()]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_and_flags_exist(page):
    text = page.read_text()
    commands = {name for name, _, _ in cli.COMMANDS} | {"models"}
    named = set(re.findall(r"kvasir-peer ([a-z]+)\b", text))
    assert named - commands - {"with"} == set()
    known = {
        settings.flag_name(f.name) for role in settings.ROLE_SETTINGS.values() for f in settings.options(role)
    }
    known |= {
        "--home",
        "--serve",
        "--prompt",
        "--max-tokens",
        "--log",
        "--experts",
        "--api-key",
        "--help",
        "--json",
    }
    for block in re.findall(r"kvasir-peer (?:bridge|stage|join|swarm|plan)((?:[^`\n]|\\\n)*)", text):
        assert set(re.findall(r"(?<!\w)--[a-z-]+", block)) - known == set()


def test_every_room_is_on_the_map():
    text = (ROOT / "docs" / "architecture.md").read_text()
    rooms = [path.name for path in (ROOT / "kvasir_peer").iterdir() if (path / "__init__.py").exists()]
    empty = [room for room in rooms if not (ROOT / "kvasir_peer" / room / "__init__.py").stat().st_size]
    built = [
        room
        for room in rooms
        if room not in empty or len(list((ROOT / "kvasir_peer" / room).glob("*.py"))) > 1
    ]
    assert [room for room in built if f"kvasir_peer/{room}/" not in text] == []
