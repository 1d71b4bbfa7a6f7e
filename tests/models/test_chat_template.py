"""Chat templates: what they write, and what hostile ones cannot do."""

import gc
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from kvasir_peer.errors import ModelFileError, UsageError
from kvasir_peer.models import chat_template
from kvasir_peer.models.chat_template import ChatTemplate
from kvasir_peer.models.gguf import GgufFile

HELLO = [{"role": "user", "content": "Hello"}]
ROOT = Path(__file__).resolve().parent.parent.parent
STORIES = ROOT / "tests" / "data" / "stories260K.gguf"


def rendered(source: str, **tokens: str) -> str:
    template = ChatTemplate(source, tokens)
    try:
        return template.render(HELLO)
    finally:
        template.close()


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ bos_token }}{{ messages[0].content }}", "<s>Hello"),
        ("{% if add_generation_prompt %}\n    yes\n{% endif %}", "    yes\n"),  # trim and lstrip blocks
        ("{% for n in range(9) %}{% if n == 2 %}{% break %}{% endif %}{{ n }}{% endfor %}", "01"),
        ("{% generation %}{{ 'a<b' }}{% endgeneration %}", "a<b"),
        ("{{ {'a': 'é<'} | tojson }}", '{"a": "é<"}'),
        ("{{ [1] | tojson(indent=1) }}", "[\n 1\n]"),
        ("{{ strftime_now('%Y') | int > 2000 }}", "True"),
        ("{{ tools is none }}", "True"),
        ("{% set ns = namespace(n=1) %}{% set ns.n = 2 %}{{ ns.n }}", "2"),
    ],
)
def test_what_templates_are_written_with(source: str, text: str) -> None:
    assert rendered(source, bos_token="<s>") == text


def test_a_template_refuses_messages_in_its_own_words() -> None:
    with pytest.raises(UsageError, match="roles must alternate") as caught:
        rendered("{{ raise_exception('roles must\n alternate') }}")
    assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match="UndefinedError"):
        rendered("{{ messages[0].tool.name }}")


@pytest.mark.parametrize("source", ["{% if %}", "{{ 'a' | nofilter }}", "{{" + "(" * 20_000])
def test_what_is_no_template_is_refused_at_once(source: str) -> None:
    with pytest.raises(ModelFileError, match=r"no valid one|too long"):
        ChatTemplate(source, seconds=0.4)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ self.__init__.__globals__ }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    with pytest.raises(UsageError):
        rendered(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ size_token * 99999999999 }}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
        "{% set a = namespace(x=[1], y=[1]) %}{% for i in range(60) %}{% set a.x = [a.x, a.x] %}"
        "{% set a.y = [a.y, a.y] %}{% endfor %}{{ a.x == a.y }}",
        "{% for i in range(99999) %}{{ size_token * 9999 }}{% endfor %}",
        "{{ '%999999999999d' % 1 }}",
    ],
    ids=["loops", "product", "tree", "compare", "output", "padding"],
)
def test_time_memory_and_output_are_bounded(source: str) -> None:
    template = ChatTemplate(source, {"size_token": "x"}, seconds=0.4)
    with pytest.raises((ModelFileError, UsageError)) as caught:
        template.render(HELLO)
    assert "\n" not in str(caught.value)
    template.close()


def test_a_template_that_was_stopped_can_be_asked_again() -> None:
    source = "{% if messages[0].content == 'loop' %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}"
    template = ChatTemplate(source + "{% endfor %}{% endif %}fine", seconds=1)
    with pytest.raises(ModelFileError, match="took more than 1 s"):
        template.render([{"role": "user", "content": "loop"}])
    assert template.render(HELLO) == "fine"
    template.close()


def test_threads_take_turns() -> None:
    template = ChatTemplate("{{ messages[0].content }}")
    answers: dict[int, str] = {}

    def ask(n: int) -> None:
        answers[n] = template.render([{"role": "user", "content": f"{n} " * 1000}])

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {n: f"{n} " * 1000 for n in range(8)}
    template.close()


def test_no_process_stays_behind() -> None:
    before = {child.pid for child in psutil.Process().children()}
    template = ChatTemplate("a")
    dropped = ChatTemplate("b")
    assert len({child.pid for child in psutil.Process().children()} - before) == 2
    template.close()
    template.close()
    del dropped
    gc.collect()
    assert {child.pid for child in psutil.Process().children()} <= before
    with pytest.raises(UsageError, match="closed"):
        template.render(HELLO)


def test_a_file_without_a_template_has_chatml_or_no_chat() -> None:
    with GgufFile.open(STORIES) as file:
        assert ChatTemplate.from_gguf(file.metadata) is None
    template = ChatTemplate.from_gguf({"tokenizer.ggml.tokens": ["<|im_start|>", "<|im_end|>"]})
    assert template is not None
    assert template.render(HELLO) == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert template.render(HELLO, add_generation_prompt=False) == "<|im_start|>user\nHello<|im_end|>\n"
    template.close()


def test_special_tokens_are_the_files() -> None:
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "<pad>"],
        "tokenizer.ggml.padding_token_id": 3,
        "tokenizer.chat_template": "{{ bos_token }}{{ eos_token }}{{ pad_token }}",
    }
    template = ChatTemplate.from_gguf(metadata)
    assert template is not None and template.render(HELLO) == "<s></s><pad>"
    template.close()


def test_sizes_are_limited() -> None:
    with pytest.raises(ModelFileError, match="characters"):
        ChatTemplate("x" * (chat_template.MAX_SOURCE + 1))
    with pytest.raises(ModelFileError, match="no string"):
        ChatTemplate.from_gguf({"tokenizer.chat_template": 3})


def test_the_process_ends_with_a_parent_that_is_killed() -> None:
    program = (
        "import os, psutil\n"
        "from kvasir_peer.models.chat_template import ChatTemplate\n"
        "template = ChatTemplate('a')\n"
        "print(psutil.Process().children()[0].pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False
    )
    deadline = time.monotonic() + 30
    while _runs(int(done.stdout)):
        assert time.monotonic() < deadline, "it still runs"
        time.sleep(0.02)


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE  # one that nobody has reaped is none
    except psutil.NoSuchProcess:
        return False
