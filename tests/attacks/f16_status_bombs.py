"""`status` of an address where something hostile answers: a body without end, a compressed one, JSON that is none, or deep."""

from __future__ import annotations

import argparse
import asyncio
import resource
import sys
import zlib
from collections.abc import Callable

from aiohttp import web

KINDS = ("endless", "gzip", "no JSON", "deep", "latin", "escapes", "redirect", "a number", "fine")
ADDRESS_SPACE_BYTES = 4 << 30
MOST_BYTES = 400 << 20


async def answer(request: web.Request) -> web.StreamResponse:
    kind = request.headers.get("Authorization", "").removeprefix("Bearer ")
    if request.path == "/elsewhere":
        return web.json_response({"followed": True})
    if kind == "redirect":
        raise web.HTTPFound("/elsewhere")
    if kind in ("endless", "gzip"):
        compressor = zlib.compressobj(9, zlib.DEFLATED, 31)
        pack: Callable[[bytes], bytes] = compressor.compress if kind == "gzip" else bytes
        headers = {"Content-Type": "application/json"} | ({"Content-Encoding": "gzip"} if kind == "gzip" else {})
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        try:
            while True:
                await response.write(pack(b" " * (1 << 20)))
                await asyncio.sleep(0)
        except ConnectionError:
            return response
    bodies = {
        "no JSON": b"no json",
        "deep": b"[" * 200_000 + b"]" * 200_000,
        "latin": b"\xff\xfe\xfd",
        "escapes": b'{"reason": "\\u001b[2J\\u001b]0;owned\\u0007"}',
        "a number": b"3",
    }
    return web.Response(body=bodies.get(kind, b"{}"), content_type="application/json")


def limited() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, ADDRESS_SPACE_BYTES))


async def ask(port: int, kind: str) -> str:
    """Run the command; say what is wrong with what it did, empty where nothing is."""
    arguments = ["-m", "torchft_ckpt", "status", "--lighthouse", f"127.0.0.1:{port}", "--token", kind]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        preexec_fn=limited,
    )
    out, err = await process.communicate()
    peak_bytes = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10
    last = (out + err).decode(errors="replace").strip().splitlines()[-1][:100]
    print(f"{kind}: exit status {process.returncode}, at most {peak_bytes >> 20} MiB, {last!r}")
    if b"Traceback" in err:
        return "a traceback"
    if b"\x1b" in out + err:
        return "escape sequences"
    if peak_bytes > MOST_BYTES:
        return f"{peak_bytes >> 20} MiB"
    if b"followed" in out:
        return "it followed a redirect"
    if process.returncode != (0 if kind in ("escapes", "fine") else 1):
        return f"exit status {process.returncode}"
    return ""


async def attack() -> list[str]:
    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    # What takes most memory comes last: the peak is that of all commands so far.
    kinds = sorted(KINDS, key=lambda kind: kind in ("endless", "gzip"))
    said = [f"{kind}: {why}" for kind in kinds if (why := await ask(runner.addresses[0][1], kind))]
    await runner.cleanup()
    return said


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    wrong = asyncio.run(attack())
    print(
        f"VULNERABLE: {'; '.join(wrong)}" if wrong else f"held: {len(KINDS)} answers, each taken or named in one line"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
