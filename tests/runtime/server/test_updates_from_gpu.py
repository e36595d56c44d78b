"""On a GPU: updates whose tensors are on the server's GPU answer like the file, and what goes wrong changes nothing."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
import torch
from safetensors.torch import load_file
from sidestream.runtime.api.sampling_params import SamplingParams
from sidestream.runtime.client.client import Client
from sidestream.runtime.client.device_buffer import DeviceBuffer
from sidestream.runtime.protocol.messages import Buffer, OpenBuffer, UpdateAdapter
from sidestream.runtime.server.settings import ServeSettings
from sidestream.tools.bench.random_model import write_model, write_random_adapter
from support.serving import GUARD, serve

from ..adapters.test_gpu_adapters import CONFIG

pytestmark = pytest.mark.gpu
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, skip_reading_prefix_cache=True)
PROMPT = list(range(5, 105))
TRAINER = """
    import json, sys
    from pathlib import Path
    from safetensors.torch import load_file
    from sidestream.runtime.api.adapter_update import AdapterUpdate
    from sidestream.runtime.client.device_buffer import DeviceBuffer
    path, *devices = sys.argv[1:]
    tensors = load_file(Path(path, "adapter_model.safetensors"), device="cuda")
    update = AdapterUpdate(tensors, json.loads(Path(path, "adapter_config.json").read_text()), "pin")
    uuid, handle = DeviceBuffer().write(update, devices)
    print(json.dumps([uuid, handle.hex(), update.nbytes]), flush=True)
    sys.stdin.read()
"""


def test_a_server_reads_the_trainers_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (base := tmp_path / "base").mkdir()
    write_model(base, CONFIG, 0, 16)
    paths = [write_random_adapter(tmp_path / str(index), CONFIG, 16, index) for index in range(3)]
    sizes = {"max_model_len": 512, "max_num_seqs": 4, "num_kv_pages": 60, "show_progress": False}
    settings = ServeSettings(
        model=str(base),
        llm={"load_format": "dummy", "precision": "int8", "max_loras": 2, "max_lora_rank": 16, **sizes},
        adapters={"file0": paths[0], "file1": paths[1]},
        adapter_roots=[str(tmp_path)],
        max_update_bytes=1 << 26,
    )
    sent: list[bool] = []
    write = DeviceBuffer.write

    def recorded(*arguments: object) -> object:
        memory = write(*arguments)  # type: ignore[arg-type]
        sent.append(memory is not None)
        return memory

    monkeypatch.setattr(DeviceBuffer, "write", recorded)
    with serve(settings, tmp_path / "log") as server, Client(server.address, connect_timeout=5 * GUARD) as client:

        def answer(name: str) -> list[int]:
            return client.generate([PROMPT], GREEDY, adapter=name)[0].outputs[0].token_ids

        def update(path: str, device: str) -> None:
            tensors = load_file(Path(path, "adapter_model.safetensors"), device=device)
            client.update_adapter("policy", tensors, json.loads(Path(path, "adapter_config.json").read_text()))

        for path, device in ((paths[0], "cuda"), (paths[1], "cpu"), (paths[1], "cuda"), (paths[0], "cuda")):
            update(path, device)
            assert sent.pop() == (device == "cuda")
            assert answer("policy") == answer("file0" if path == paths[0] else "file1")
        listed = {each.name: each.content for each in client.list_adapters()}
        assert listed["policy"] == listed["policy@1"] == listed["policy@4"] != listed["policy@3"] == listed["policy@2"]
        with server.connect() as wire:
            buffer = wire.call(OpenBuffer(1, 1 << 25))
            assert isinstance(buffer, Buffer) and len(buffer.devices) >= 1
            devices = buffer.devices
            trainer = subprocess.Popen(
                [sys.executable, "-c", dedent(TRAINER), paths[2], *devices],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=os.environ,
            )
            assert trainer.stdout is not None
            uuid, text, nbytes = json.loads(trainer.stdout.readline())
            handle = bytes.fromhex(text)
            for given, size, message in (
                (bytes(64), nbytes, "cannot be opened"),
                (b"\xff" * 64, nbytes, "cannot be opened"),
                (handle, 1 << 25, "bytes, not"),
                (handle[:-1], nbytes, "63 bytes"),
            ):
                fields = {"token": buffer.token, "bytes": size, "device": uuid, "handle": given}
                error = wire.call(UpdateAdapter(2, "policy", **fields))
                assert message in error.message, error
            good = {"token": buffer.token, "bytes": nbytes, "device": uuid, "handle": handle}
            assert wire.call(UpdateAdapter(3, "other", **good)).version == 1
            trainer.send_signal(signal.SIGKILL)
            trainer.wait()
            assert "trainer must live" in wire.call(UpdateAdapter(4, "policy", **good)).message
        assert answer("policy") == answer("file0")
        update(paths[1], "cuda")
        assert answer("policy") == answer("policy@5") == answer("file1")
        assert torch.cuda.is_available(), "the trainer's own context lives"
