"""The lease of several lighthouses in etcd, 3.4 or newer, by the JSON that its own gateway speaks (`/v3/`).

    PREFIX/leader   who holds the lease. etcd deletes it when the lease is over; its create_revision is the fence.
    PREFIX/jobs     what outlives a leader; written only in a transaction that finds the leader's key as it was, and nothing
                    written since we heard of etcd last: a write that was late may not undo a later one.

A renewal counts only if the leader's key is read after it, by a quorum of etcd: a member of etcd that is cut off may still renew.
"""

from __future__ import annotations

import base64
import contextlib
import json
import secrets
import ssl
from typing import Any

import aiohttp

from torchft_ckpt.config import stamp_of
from torchft_ckpt.coordination.channel import client_session, read_at_most
from torchft_ckpt.core.coordination.leadership import LeaseHeld, LeaseOf
from torchft_ckpt.core.text import printable
from torchft_ckpt.errors import AuthenticationError, ConfigError, TlsError
from torchft_ckpt.network import parse_addresses

ETCD_LEASE_S = 2.0
"""etcd gives none below 1.5 times its election timeout, which is 1 s by default, and counts in whole seconds."""
_MAX_ANSWER_BYTES = 4 << 20
_UNAUTHENTICATED, _DENIED, _NOT_FOUND, _INVALID = 16, 7, 5, 3


class EtcdStore:
    """A `core.coordination.leadership.LeaseStore`. Use on one event loop only.

    Args:
        addresses: `http://host:port` or `https://host:port`, several with commas between; the scheme of the first is that of
            all. Whichever answers is asked.
        leader: the address of this lighthouse, for people and for the others.
        prefix: of the two keys.
        authority, certificate, key: files, PEM; without the first the authorities of this machine are believed.
        user, password: if etcd wants them.

    Raises:
        ConfigError: an address or a file cannot be used.
    """

    lease_s = ETCD_LEASE_S

    def __init__(
        self,
        addresses: str,
        *,
        leader: str,
        prefix: str = "torchft_ckpt",
        authority: str | None = None,
        certificate: str | None = None,
        key: str | None = None,
        user: str = "",
        password: str = "",
    ) -> None:
        is_tls = addresses.strip().startswith("https://")
        places = parse_addresses(addresses, what="etcd address", has_tls=is_tls)
        self._urls = [f"{'https' if is_tls else 'http'}://{place}/v3" for place in places]
        self._at = 0
        self._files = (authority, certificate, key) if is_tls else ()
        self._stamps: list[object] = []
        self._ssl: ssl.SSLContext | None = None
        if not is_tls and (authority or certificate):
            raise ConfigError("files of TLS are given for etcd, and its address is not https://", "etcd")
        try:
            self._read_files()
        except OSError as error:  # an SSLError is one, too
            files = ", ".join(filter(None, self._files))
            raise ConfigError(f"the files of TLS for etcd ({files}) cannot be used: {error}", "etcd") from error
        self._leader_key, self._jobs_key = (_text(f"{prefix}/{name}") for name in ("leader", "jobs"))
        self._leader, self._own_name = leader, secrets.token_hex(8)
        self._user, self._password, self._auth_token = user, password, ""
        self._lease_id = 0
        self._fence = self._revision = 0
        self._session: aiohttp.ClientSession | None = None

    async def acquire(self) -> LeaseHeld | LeaseOf | None:
        """Take the lease unless another one holds it."""
        kept = await self._get(self._leader_key)
        if kept is not None:
            try:
                said = json.loads(base64.b64decode(kept["value"]))
                leader, name = printable(str(said["leader"])[:300]), said["name"]
            except (ValueError, KeyError, TypeError):
                leader, name = "an unknown address", ""
            if name != self._own_name:
                return LeaseOf(leader)
        await self._revoke()
        self._lease_id = secrets.randbits(62) + 1
        granted = await self._post("lease/grant", {"TTL": int(self.lease_s), "ID": str(self._lease_id)})
        value = _text(json.dumps({"leader": self._leader, "name": self._own_name}))
        put = {"key": self._leader_key, "value": value, "lease": str(self._lease_id)}
        done = await self._put_if([self._led_since(0)], put)
        if not done.get("succeeded"):
            await self._revoke()
            return None
        self._fence = int(done["header"]["revision"])
        kept = await self._get(self._jobs_key)
        return LeaseHeld(self._fence, float(granted["TTL"]), base64.b64decode((kept or {}).get("value", "")))

    async def renew(self) -> LeaseHeld | None:
        """Hold the lease for longer."""
        kept_alive = await self._post("lease/keepalive", {"ID": str(self._lease_id)})
        lease_s = float(kept_alive.get("result", {}).get("TTL", 0))
        kept = await self._get(self._leader_key)
        is_ours = lease_s > 0 and kept is not None and int(kept["create_revision"]) == self._fence
        return LeaseHeld(self._fence, lease_s) if is_ours else None

    async def write(self, data: bytes) -> LeaseHeld | None:
        """Write if the lease is ours."""
        put = {"key": self._jobs_key, "value": base64.b64encode(data).decode()}
        known = {"key": self._jobs_key, "target": "MOD", "result": "LESS", "mod_revision": str(self._revision + 1)}
        done = await self._put_if([self._led_since(self._fence), known], put)
        if done.get("succeeded"):
            return LeaseHeld(self._fence, self.lease_s)
        kept = await self._get(self._leader_key)
        if kept is not None and int(kept["create_revision"]) == self._fence:
            raise ConnectionError("a write that it had not answered was carried out just now")
        return None

    async def release(self) -> None:
        """Give the lease up, and the connections."""
        try:
            if self._session is not None:
                await self._revoke()
        finally:
            if self._session is not None:
                await self._session.close()

    # ---------------------------------------------------------------------------------------------------------- the gateway

    async def _revoke(self) -> None:
        if self._lease_id:
            await self._post("lease/revoke", {"ID": str(self._lease_id)})
            self._lease_id = 0

    async def _get(self, key: str) -> dict[str, Any] | None:
        found = await self._post("kv/range", {"key": key})
        kept: list[dict[str, Any]] = found.get("kvs") or []
        return kept[0] if kept else None

    def _led_since(self, fence: int) -> dict[str, str]:
        return {"key": self._leader_key, "target": "CREATE", "result": "EQUAL", "create_revision": str(fence)}

    async def _put_if(self, compare: list[dict[str, str]], put: dict[str, str]) -> dict[str, Any]:
        return await self._post("kv/txn", {"compare": compare, "success": [{"request_put": put}]})

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Make a call of one member of etcd. If that does not answer the next call goes to the next one.

        Raises:
            OSError: there was no answer of use; what was asked for may have been done.
            AuthenticationError: etcd refuses us; or a `TlsError`.
        """
        if self._user and not self._auth_token:
            self._auth_token = await self._authenticate()
        status, answer = await self._send(path, body)
        code = answer.get("code", 0)
        if self._user and (status == 401 or code == _UNAUTHENTICATED):  # its token is valid for a while only
            self._auth_token = await self._authenticate()
            status, answer = await self._send(path, body)
            code = answer.get("code", 0)
        if status == 200 or (code == _NOT_FOUND and path.startswith("lease/")):
            self._revision = max(self._revision, int(answer.get("header", {}).get("revision", 0)))
            return answer
        why = printable(str(answer.get("message") or answer.get("error") or f"HTTP {status}")[:300])
        is_refused = status in (401, 403) or code in (_UNAUTHENTICATED, _DENIED)
        if is_refused or (code == _INVALID and "user name is empty" in why):
            told = "give --etcd-user and --etcd-password-file of a user that may read and write below --etcd-prefix"
            raise AuthenticationError(f"etcd at {self._urls[self._at]} refuses us ({why}); {told}", "etcd")
        url, self._at = self._urls[self._at], (self._at + 1) % len(self._urls)
        raise ConnectionError(f"etcd at {url}: {why}")

    async def _authenticate(self) -> str:
        self._auth_token = ""
        status, answer = await self._send("auth/authenticate", {"name": self._user, "password": self._password})
        if status >= 500:
            raise ConnectionError(f"etcd at {self._urls[self._at]} cannot check a password now: HTTP {status}")
        if "token" not in answer:
            why = printable(str(answer.get("message") or answer.get("error") or f"HTTP {status}")[:300])
            told = "mend --etcd-user or --etcd-password-file"
            raise AuthenticationError(f"etcd refuses user {self._user!r} ({why}); {told}", "etcd")
        return str(answer["token"])

    def _read_files(self) -> None:
        """Read the files of TLS, if they are others than before: connections are made with those of now."""
        authority, certificate, key = self._files or (None, None, None)
        stamps: list[object] = [stamp_of(path) for path in filter(None, self._files)]
        if self._files and (self._ssl is None or stamps != self._stamps):
            context = ssl.create_default_context(cafile=authority)
            if certificate:
                context.load_cert_chain(certificate, key, password="")
            self._ssl, self._stamps = context, stamps

    async def _send(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Send to the first member from `_at` on that can be reached, which is the next one if this one does not answer."""
        if self._session is None or self._session.closed:
            self._session = client_session()
        with contextlib.suppress(OSError):  # they are being written, perhaps
            self._read_files()
        headers = {"Authorization": self._auth_token} if self._auth_token else {}
        why = ""
        for _ in self._urls:
            url, has_answered = self._urls[self._at], False
            try:
                asked = self._session.post(f"{url}/{path}", json=body, headers=headers, ssl=self._ssl or True)
                async with asked as response:
                    answer = json.loads(await read_at_most(response, _MAX_ANSWER_BYTES))
                    if not isinstance(answer, dict):
                        raise ValueError("it is no JSON object")
                    has_answered = True
                    return response.status, answer
            except aiohttp.ClientSSLError as error:
                told = "mend --etcd-ca, which is to be the authority of etcd's certificate"
                raise TlsError(f"no TLS with etcd at {url}: {printable(str(error)[:300])}; {told}", "etcd") from error
            except aiohttp.ClientConnectorError as error:  # nothing was sent
                why = printable(str(error)[:300])
            except (aiohttp.ClientError, ValueError, RecursionError) as error:
                why = printable(str(error)[:300]) or type(error).__name__
                raise ConnectionError(f"etcd at {url}: {why}") from error
            finally:
                if not has_answered:  # also if the caller's patience is over
                    self._at = (self._at + 1) % len(self._urls)
        raise ConnectionError(f"etcd at {url}: {why}")


def _text(text: str) -> str:
    return base64.b64encode(text.encode()).decode()
