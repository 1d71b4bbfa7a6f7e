"""A node counts what its links carried, those that are closed included."""

from helpers_net import ECHO, echo_link, nodes

from kvasir_peer.net.node import LinkTraffic


async def test_traffic_by_protocol_outlives_its_links() -> None:
    async with nodes(2) as (a, b):
        a.handle(ECHO, 1000, echo_link)
        first = await b.open_link(a.peer_id, ECHO, addresses=a.addresses())
        await first.send(b"four")
        assert bytes(await first.receive()) == b"four"
        assert b.statistics().traffic == {ECHO: LinkTraffic(1, 1, 1, 4, 4)}
        first.close()
        first.close()
        second = await b.open_link(a.peer_id, ECHO)
        await second.send(b"seven77")
        assert bytes(await second.receive()) == b"seven77"
        assert b.statistics().traffic == {ECHO: LinkTraffic(2, 2, 2, 11, 11)}
        assert len(b.statistics().links) == 1
