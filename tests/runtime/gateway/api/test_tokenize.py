"""/tokenize with tools and spellings, /tokenizer_info, and paths of other servers."""

import asyncio

import httpx
import jinja2
import pytest
from sidestream.runtime.gateway.interfaces import ModelInfo
from sidestream.runtime.text.chat_files import ChatTemplates
from support.gateway import Books, FakeEngines, gateway

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
TEMPLATE = "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}{{ messages[-1].content }}"


def ask(method, path, body=None, engines=None, admission=None):
    async def run():
        async with gateway(engines or FakeEngines(), admission) as http:
            answer = await http.request(method, path, json=body)
        return answer.status_code, answer.json()

    return asyncio.run(run())


def with_template(**tokens):
    engines = FakeEngines()
    engines.info = ModelInfo("base", 256, 4096, True, ChatTemplates({"default": TEMPLATE, "rag": "R"}, tokens))
    return engines


def test_tools_count_as_in_a_chat():
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": [WEATHER]}
    status, answer = ask("POST", "/tokenize", body, with_template())
    assert status == 200 and "".join(map(chr, answer["tokens"])) == "[weather]hi"
    assert answer["count"] == len("[weather]hi") and "token_strs" not in answer


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"prompt": "hi", "tools": [WEATHER]}, "tools"),
        ({"messages": [{"role": "user", "content": "hi"}], "tools": [WEATHER, WEATHER]}, "tools"),
    ],
)
def test_tools_that_cannot_be_shown_are_refused(body, field):
    status, answer = ask("POST", "/tokenize", body)
    assert status == 400 and answer["error"]["param"] == field


def test_spellings_come_with_the_ids(served):
    """They are the vocabulary's: a space before a word is visible."""
    body = {"prompt": "Ahoy there", "add_special_tokens": False, "return_token_strs": True}
    answer = httpx.post(served.url + "/tokenize", json=body, timeout=600).json()
    assert len(answer["token_strs"]) == len(answer["tokens"]) == answer["count"] > 1
    assert "".join(answer["token_strs"]).replace("Ġ", " ").replace("▁", " ").strip() == "Ahoy there"
    assert "".join(answer["token_strs"]) != "Ahoy there"
    del body["return_token_strs"]
    assert httpx.post(served.url + "/tokenize", json=body, timeout=600).json()["tokens"] == answer["tokens"]


def test_a_client_can_render_and_tokenize_with_the_info(served):
    """As lm-eval's remote tokenizer does."""
    info = httpx.get(served.url + "/tokenizer_info", timeout=600).json()
    assert info["eos_token"] and info["model_max_length"] == 256
    messages = [{"role": "user", "content": "Who sails?"}]
    tokens = {name: text or "" for name, text in info.items() if name.endswith("_token")}
    text = jinja2.Template(info["chat_template"], trim_blocks=True, lstrip_blocks=True).render(
        messages=messages, add_generation_prompt=True, **tokens
    )
    body = {"prompt": text, "add_special_tokens": False}
    rendered = httpx.post(served.url + "/tokenize", json=body, timeout=600).json()["tokens"]
    assert rendered == httpx.post(served.url + "/tokenize", json={"messages": messages}, timeout=600).json()["tokens"]


def test_the_info_has_tokens_and_the_plain_template():
    _, info = ask("GET", "/tokenizer_info", engines=with_template(bos_token="<s>", eos_token="</s>", pad_token=""))
    assert info["chat_template"] == TEMPLATE and info["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert [info[f"{name}_token"] for name in ("bos", "eos", "pad", "unk")] == ["<s>", "</s>", None, None]


def test_the_info_is_for_those_who_may_use_the_base_model():
    books = Books()
    books.hidden = {"base"}
    assert ask("GET", "/tokenizer_info", admission=books)[0] == 404


@pytest.mark.parametrize(
    ("path", "status", "remedy"),
    [
        ("/v1/embeddings", 404, "embedding model"),
        ("/score", 404, "echo=true"),
        ("/v2/rerank/", 404, "echo=true"),
        ("/pooling", 404, "structured_outputs"),
        ("/classify", 404, "structured_outputs"),
        ("/init_communicator/", 501, "/v1/load_lora_adapter"),
        ("/reset_prefix_cache", 501, "no reset"),
        ("/v1/nothing", 404, "/docs"),
    ],
)
def test_paths_of_other_servers_say_what_to_use(path, status, remedy):
    found, answer = ask("POST", path, {"input": "x"})
    assert found == status and remedy in answer["error"]["message"]
