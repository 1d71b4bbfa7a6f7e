"""The dashboard in a real browser: it loads without a complaint, shows the ring, and lets people talk to it."""

import json

import pytest
import trio
from helpers_api import Scripted, saying, until
from helpers_bridge import PEERS, PlayedBridge, played
from helpers_browser import open_page

from kvasir_peer.api.service import TokenEvent
from kvasir_peer.errors import NotReadyError

pytestmark = pytest.mark.timeout(120)

KEY = "a-key-of-the-owner"
SAID = "[...document.querySelectorAll('#said p')].map(p => [p.className, p.textContent])"
DONE = "document.getElementById('send').textContent === 'Send'"


def text(selector):
    return f"document.querySelector({json.dumps(selector)}).innerText"


async def serves(page, server):
    await page.goto(server.url + "/")
    await page.wait_for("document.querySelectorAll('.stage').length === 3")


async def ask(page, question):
    await page.evaluate("document.getElementById('question').focus()")
    await page.type(question)
    await page.press("Enter", 13)


async def test_the_page_shows_the_ring_and_its_timeline():
    async with played(PlayedBridge()) as server, open_page() as page:
        await serves(page, server)
        assert await page.evaluate(text("#pill")) == "serving"
        assert await page.evaluate(text("#headline")) == "org/small-1 is served by 3 machines"
        stages = await page.evaluate("[...document.querySelectorAll('.stage')].map(s => s.innerText)")
        for index, stage in enumerate(stages):
            assert f"layers {2 * index} to {2 * index + 1}" in stage
            assert PEERS[index][-8:] in stage
            assert all(word in stage for word in ("held", "blocked", "starved", "relayed", "21 ms"))
        widths = await page.evaluate(
            "[...document.querySelectorAll('.bar')].map(b => [...b.children].map(i => parseFloat(i.style.width)))"
        )
        assert all(0 < sum(bar) <= 100.01 for bar in widths)
        words = await page.evaluate(text("#words"))
        assert words.startswith(("starved: ", "saturated: stage 2 (layers 2 to 3) computes"))
        await page.wait_for("document.querySelectorAll('#requests li').length === 3")
        # Bars are on the canvas: colours that no text and no background has.
        drawn = """(() => {
            const c = document.getElementById('timeline'), g = c.getContext('2d');
            const data = g.getImageData(70, 0, c.width - 70, c.height).data;
            let vivid = 0;
            for (let i = 0; i < data.length; i += 4)
                vivid += Math.max(data[i], data[i+1], data[i+2]) - Math.min(data[i], data[i+1], data[i+2]) > 90;
            return vivid > 500;
        })()"""
        await page.wait_for(drawn)
        assert "kvasir1…" in await page.evaluate(text(".steps"))
        assert await page.evaluate(text("#base")) == f"{server.url}/v1\ncopy"
        assert page.problems == []
        assert all(url.startswith((server.url, "about:")) for url in page.requests)


async def test_a_batch_tells_what_it_holds():
    async with played(PlayedBridge()) as server, open_page() as page:
        await serves(page, server)
        await page.wait_for("document.querySelectorAll('#requests li').length === 3")
        with trio.fail_after(60):
            await page.evaluate("document.getElementById('hold').click()")
            box = await page.evaluate(
                "(({x, y, width}) => [x, y, width])(document.getElementById('timeline').getBoundingClientRect())"
            )
            for column in range(80, int(box[2]), 3):
                await page.move(box[0] + column, box[1] + 60)
                if not await page.evaluate("document.getElementById('tip').hidden"):
                    break
        tip = await page.evaluate("document.getElementById('tip').textContent")
        assert "at stage 2" in tip and "request " in tip
        assert page.problems == []


async def test_an_answer_streams_into_the_page():
    service = Scripted(
        script=lambda request: [
            *saying("The sky scatters blue.")[:-1],
            TokenEvent(-1, comment="a stage was lost"),
            0.5,
            *saying(" <b>Truly</b>"),
        ]
    )
    async with played(PlayedBridge(), service) as server, open_page() as page:
        await serves(page, server)
        await ask(page, "Why is the sky blue?")
        await page.wait_for("document.getElementById('told').textContent === 'paused: a stage was lost'")
        assert await page.evaluate(SAID) == [
            ["you", "Why is the sky blue?"],
            ["it writing", "The sky scatters blue."],
        ]
        await page.wait_for(DONE)
        answer = "The sky scatters blue. <b>Truly</b>"
        assert (await page.evaluate(SAID))[1] == ["it", answer]
        assert "tokens; first after" in await page.evaluate("document.getElementById('told').textContent")
        await ask(page, "And at night?")
        await until(lambda: len(service.requests) == 2)
        await page.wait_for(DONE)
        assert len(service.requests[1].prompt) > len(service.requests[0].prompt) + len(answer)
        await page.evaluate("document.getElementById('forget').click()")
        assert await page.evaluate(SAID) == []
        assert page.problems == []


async def test_stopping_an_answer_cancels_it_at_the_service():
    service = Scripted(script=lambda request: [*saying("Well")[:-1], 100.0])
    async with played(PlayedBridge(), service) as server, open_page() as page:
        await serves(page, server)
        await ask(page, "Tell me everything")
        await page.wait_for("document.querySelector('.it')?.textContent === 'Well'")
        await page.evaluate("document.getElementById('send').click()")
        await until(lambda: service.running == 0)
        await page.wait_for(DONE)
        assert (await page.evaluate(SAID))[1] == ["it", "Well"]


async def test_a_refusal_is_said_in_the_conversation():
    service = Scripted(refusal=NotReadyError("2 of 3 stages are here"))
    async with played(PlayedBridge(), service) as server, open_page() as page:
        await serves(page, server)
        await ask(page, "Hello?")
        await page.wait_for("document.querySelector('.problem') !== null")
        assert await page.evaluate(SAID) == [["you", "Hello?"], ["problem", "2 of 3 stages are here"]]


async def test_a_ring_that_waits_says_for_what():
    async with played(PlayedBridge(state="gathering")) as server, open_page(390, 800, mobile=True) as page:
        await page.goto(server.url + "/")
        await page.wait_for(f"{text('#pill')} === 'gathering'")
        assert await page.evaluate(text("#headline")) == "org/small-1 waits for 2 more machines"
        assert await page.evaluate(text("#words")) == "1 of 3 stages are here"
        assert "it waits <b>here</b>" in await page.evaluate(text("#others"))  # text stays text
        assert await page.evaluate("document.documentElement.scrollWidth") <= 390
        assert page.problems == []


async def test_the_page_fits_a_phone():
    async with played(PlayedBridge()) as server, open_page(360, 740, dark=True, mobile=True) as page:
        await serves(page, server)
        wide = """[...document.querySelectorAll('main *')].filter(e => e.getBoundingClientRect().right > 361)
            .filter(e => !e.closest('code')).map(e => e.tagName + '.' + e.className)"""
        assert await page.evaluate(wide) == []
        assert await page.evaluate("document.documentElement.scrollWidth") <= 360
        background = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert max(int(part) for part in background[4:-1].split(",")) < 40  # dark where it is wanted dark


async def test_a_key_is_asked_for_and_kept_for_the_tab():
    async with played(PlayedBridge(), keys=[KEY]) as server, open_page() as page:
        await page.goto(server.url + "/")
        await page.wait_for("!document.getElementById('key-form').hidden")
        await page.evaluate("document.getElementById('key').focus()")
        await page.type("a wrong key")
        await page.press("Enter", 13)
        await page.wait_for("document.getElementById('key-problem').textContent !== ''")
        await page.type(KEY)
        await page.press("Enter", 13)
        await page.wait_for("document.querySelectorAll('.stage').length === 3")
        assert await page.evaluate("document.getElementById('key-form').hidden")
        await ask(page, "Hi")
        await page.wait_for("document.querySelector('.it:not(.writing)')?.textContent === 'Hello!'")
