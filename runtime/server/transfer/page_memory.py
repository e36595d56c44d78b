"""Memory through which prefill engines pass KV pages to decode engines, and the settings of both.

The supervisor of the engines creates it, so that it outlives each engine. It has no name in the file system, and the
kernel frees it when the last process that maps it ends.
"""

import os
import secrets
from pathlib import Path

from msgspec import structs

from ..settings import ServeSettings

DEFAULT_GB = 8.0
MIN_BYTES = 1 << 14
"""Memory that is mapped, so that the engine reports that it holds no page."""


class PageMemory:
    """`gigabytes` GiB for each of `count` prefill engines, allocated when engines start.

    Raises ValueError if the host has too little free memory.
    """

    def __init__(self, count: int, gigabytes: float) -> None:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")) / (1 << 20)
        if count * gigabytes > free:
            raise ValueError(
                f"--kv-host-gb {gigabytes:g} for {count} prefill engines needs {count * gigabytes:.2f} GiB of host "
                f"memory, and {free:.2f} are free; lower it"
            )
        self._handles: list[int] = []
        self._sources: dict[str, str] = {}
        try:
            for _ in range(count):
                handle = os.memfd_create("sidestream-kv-pages")
                self._handles.append(handle)
                os.truncate(handle, max(MIN_BYTES, int(gigabytes * (1 << 30))))
                self._sources[secrets.token_hex(8)] = f"/proc/{os.getpid()}/fd/{handle}"
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the memory for new engines. May be called twice."""
        while self._handles:
            os.close(self._handles.pop())

    def settings_of(self, settings: ServeSettings, index: int) -> ServeSettings:
        """Return the settings of engine `index`. The first `count` engines are prefill engines."""
        names = list(self._sources)
        if index < len(names):
            own = {names[index]: self._sources[names[index]]}
            llm = {"kv_host_gb": DEFAULT_GB} | settings.llm
            return structs.replace(settings, kv_role="prefill", kv_sources=own, llm=llm)
        llm = {name: value for name, value in settings.llm.items() if name != "kv_host_gb"}
        return structs.replace(settings, kv_role="decode", kv_sources=self._sources, llm=llm)


def check_split(settings: ServeSettings) -> None:
    """Raise ValueError for settings that engines of two kinds cannot have."""
    if settings.llm.get("tensor_parallel_size", 1) > 1:
        raise ValueError(
            "--prefill-engines needs engines of one GPU each; leave --tensor-parallel-size out, or use "
            "--data-parallel-size"
        )
    if settings.llm.get("enable_prefix_caching") is False:
        raise ValueError("--prefill-engines needs the prefix cache; leave --no-prefix-caching out")
    if settings.llm.get("kv_host_gb", DEFAULT_GB) == 0:
        raise ValueError("--prefill-engines needs host memory for KV pages; raise --kv-host-gb, or leave it out")
    if settings.llm.get("kv_disk") is not None:
        raise ValueError("--prefill-engines keeps KV pages in memory that engines share; leave --kv-disk out")
