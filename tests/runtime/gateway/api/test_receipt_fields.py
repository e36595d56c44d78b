"""`receipt` reaches the engine from every endpoint that generates text, and its receipt the client."""

import asyncio
from typing import Any

import msgspec
import pytest
from sidestream.runtime.gateway.interfaces import EngineRequest
from sidestream.runtime.protocol.messages import Chunk
from support.gateway import FakeEngines, events, gateway

RECEIPT = {"v": 1, "mac": "aa"}
TALK = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hi", "max_tokens": 3},
    "/v1/chat/completions": TALK,
    "/v1/responses": {"input": "Hi", "max_output_tokens": 3},
    "/v1/messages": {"model": "base", **TALK},
}


class SigningEngines(FakeEngines):
    """Answers requests for a receipt with RECEIPT."""

    def _chunk(self, request: EngineRequest, *args: Any) -> Chunk:
        chunk = super()._chunk(request, *args)
        signed = request.params.receipt and chunk.usage is not None
        return msgspec.structs.replace(chunk, receipt=RECEIPT) if signed else chunk


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_the_answer_has_the_receipt(path: str, stream: bool) -> None:
    async def ask(**body: Any) -> list[dict[str, Any]]:
        async with gateway(SigningEngines()) as http:
            answer = await http.post(path, json=BODIES[path] | {"stream": stream} | body)
            assert answer.status_code == 200, answer.text
            return [each for each in events(answer.text) if each != "[DONE]"] if stream else [answer.json()]

    def receipts(answer: list[dict[str, Any]]) -> list[Any]:
        bodies = [each.get("response", each) for each in answer]
        return [each["sidestream_receipt"] for each in bodies if "sidestream_receipt" in each]

    assert receipts(asyncio.run(ask(receipt=True))) == [RECEIPT]
    assert receipts(asyncio.run(ask())) == []
