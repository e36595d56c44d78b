"""The bare application at the gateway's pace."""

import asyncio

from sidestream.tools.bench.serving.bare_app import Steps


def test_each_step_serves_every_stream_once_also_after_one_has_gone() -> None:
    async def main() -> list[tuple[int, ...]]:
        steps, counts, seen = Steps(0.001), [0, 0, 0], []

        async def stream(index: int) -> None:
            while True:
                await steps.end()
                counts[index] += 1

        tasks = [asyncio.create_task(stream(index)) for index in range(3)]
        await asyncio.sleep(0)
        for step in range(1, 6):
            await steps.end()
            seen.append(tuple(counts))
            if step == 3:
                tasks[1].cancel()
        for task in tasks:
            task.cancel()
        return seen

    seen = asyncio.run(main())
    assert seen == [(1, 1, 1), (2, 2, 2), (3, 3, 3), (4, 3, 4), (5, 3, 5)]
