"""What it means that two parties do not come to speak TLS, in words that name what to do. OpenSSL's names and numbers go in."""

from __future__ import annotations

_NOT_TLS = (
    "WRONG_VERSION_NUMBER",
    "HTTP_REQUEST",
    "UNKNOWN_PROTOCOL",
    "PACKET_LENGTH_TOO_LONG",
    "RECORD_LAYER_FAILURE",
)
"""What OpenSSL says of an answer that is no TLS record."""
OTHER_NAMES = (62, 64)
"""OpenSSL's numbers for a certificate that is for other names, or other addresses."""
NOT_YET, _EXPIRED = 9, 10
CERTIFICATE_IS_MISSING = (
    "show a certificate of this job's authority; set TORCHFT_CKPT_TLS_CERT and TORCHFT_CKPT_TLS_KEY"
)
"""Said to a client that has none and needs one."""


def why_no_session(reason: str, code: int, verified: str, *, authority: str | None, certificate: str) -> str:
    """Say of the other side, "it", why there is no TLS session with it.

    Args:
        reason: OpenSSL's name for what went wrong.
        code: its number for what is wrong with the certificate that the other side showed; 0 for nothing.
        verified: the same in OpenSSL's words.
        authority: the file that says whom we believe; empty: the authorities of this machine. None: it is not known, or it is a
            client that is not believed, and nothing is to be done on this side.
        certificate: the file with our own, empty for none.
    """
    verified = verified.rstrip(".")
    if verified and authority is None:
        return f"its certificate does not verify: {verified}"
    if verified:
        believed = f"{authority} (TORCHFT_CKPT_TLS_CA)" if authority else "the authorities of this machine"
        what = f"its certificate does not verify with {believed}: {verified}"
        if code == _EXPIRED:
            return f"{what}; renew it there, which needs no restart"
        if code == NOT_YET:
            return f"{what}; set the clocks of both machines"
        if code in OTHER_NAMES:
            return f"{what}; use an address that is in it, or make one that names this address"
        return f"{what}; set TORCHFT_CKPT_TLS_CA on this side to the authority that has signed it"
    if reason in _NOT_TLS:
        return "it speaks plain http, and TLS is set up here; set TORCHFT_CKPT_TLS_CERT, _KEY and _CA there too"
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE" or reason.endswith("CERTIFICATE_REQUIRED"):
        who = "it shows" if reason.startswith("PEER") else "it wants a certificate, and we show"
        return f"{who} none of the authority's"
    if "ALERT" in reason and ("CERTIFICATE" in reason or reason.endswith("UNKNOWN_CA")):
        told = reason.partition("ALERT_")[2].lower().replace("_", " ")
        return f"it does not accept our certificate {certificate}".rstrip() + f" ({told})"
    return f"no TLS session was agreed on: {reason}"
