"""``kvasir-peer status``."""

from __future__ import annotations

import json
import os
import time
from contextlib import closing
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from kvasir_peer import identity, running, settings
from kvasir_peer.commands.common import HomeFlag
from kvasir_peer.errors import KvasirError


def _folder_bytes(folder: Path) -> int:
    total = 0
    pending = [folder]
    while pending:
        try:
            entries = list(os.scandir(pending.pop()))
        except FileNotFoundError:
            continue
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                pending.append(Path(entry.path))
            else:
                total += entry.stat(follow_symlinks=False).st_size
    return total


def _taken(home: Path) -> dict[str, int] | None:
    """What a bridge has had from volunteers, of its ledger; None where there is none."""
    import sqlite3

    file = home / settings.LEDGER_FILE
    if not file.exists():
        return None
    try:
        with closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True, timeout=1.0)) as base:
            peers, rows, checked = base.execute(
                "SELECT count(*), coalesce(sum(rows), 0), coalesce(sum(checked), 0) FROM given"
            ).fetchone()
            (quarantined,) = base.execute("SELECT count(*) FROM quarantine").fetchone()
    except sqlite3.Error:
        return None  # another program's file, or one that is being made
    return {"peers": peers, "rows": rows, "checked": checked, "quarantined": quarantined}


def _time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def show_status(
    *,
    home: HomeFlag = None,
    as_json: Annotated[bool, Parameter(name="--json", negative="", help="Print one JSON object.")] = False,
) -> None:
    """Show what this machine is in its swarm: key, ticket, weights on disk, and what runs."""
    folder = settings.home_directory(home)
    found: dict[str, object] = {"home": str(folder), "peer": None, "ticket": None, "running": None}
    lines = [f"home     {folder}"]
    try:
        peer_id = identity.load(folder / identity.KEY_FILE).peer_id
        found["peer"] = peer_id
        lines.append(f"peer     {peer_id}")
    except FileNotFoundError:
        lines.append("peer     no key yet (made on the first start, or by kvasir-peer id)")
    if (folder / settings.TICKET_FILE).exists():
        try:
            ticket = settings.load_ticket(folder)
        except KvasirError as error:
            lines.append(f"ticket   {error}")
        else:
            found["ticket"] = {
                "swarm": ticket.swarm,
                "bridge": ticket.bridge,
                "relays": ticket.relays,
                "roles": ticket.ordered_roles(),
                "expires": ticket.expires,
            }
            over = "expired" if ticket.expires <= time.time() else "valid until"
            lines.append(
                f"ticket   swarm {ticket.swarm}, for {' or '.join(ticket.ordered_roles())}, "
                f"{over} {_time(ticket.expires)}"
            )
            lines.append(f"bridge   {ticket.bridge}")
            lines += [f"relay    {relay}" for relay in ticket.relays]
    else:
        lines.append("ticket   none (kvasir-peer join TICKET)")
    held = _folder_bytes(folder / settings.STORE_FOLDER)
    found["store_bytes"] = held
    lines.append(f"weights  {held / 1e6:.1f} MB on disk")
    given = running.given(folder)
    found["given"] = {"rows": given.rows, "seconds": given.seconds, "sent_bytes": given.sent_bytes}
    if given.rows:
        lines.append(f"given    {given.rows:,} rows of experts, {given.seconds:.0f} s of computing")
    if given.sent_bytes:
        lines.append(f"sent     {given.sent_bytes / 1e6:.1f} MB of weights to other volunteers")
    taken = _taken(folder)
    if taken is not None:
        found["volunteers"] = taken
    if taken is not None and any(taken.values()):
        lines.append(
            f"taken    {taken['rows']:,} rows of {taken['peers']} volunteers, {taken['checked']:,} of them checked; "
            f"quarantined: {taken['quarantined']}"
        )
    role = running.find(folder)
    if role is None:
        lines.append("running  nothing")
    else:
        found["running"] = {name: getattr(role, name) for name in role.__slots__}
        lines.append(f"running  {role.role} (process {role.pid}) since {_time(role.started)}")
        if role.base_url:
            lines.append(f"serves   {role.base_url}")
        if role.relays:
            lines.append(f"relays   {role.relays}")
        if role.text:
            lines.append(f"last     {role.text} ({_time(role.changed)})")
    print(json.dumps(found) if as_json else "\n".join(lines))
