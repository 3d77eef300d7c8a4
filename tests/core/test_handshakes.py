"""What OpenSSL says of a handshake that fails becomes a sentence about the other side, and what to do."""

from __future__ import annotations

import pytest

from torchft_ckpt.core.services.handshakes import why_no_session

CASES: dict[tuple[str, int, str], str] = {
    ("CERTIFICATE_VERIFY_FAILED", 10, "certificate has expired"): "its certificate does not verify with ca.pem"
    " (TORCHFT_CKPT_TLS_CA): certificate has expired; renew it there, which needs no restart",
    ("CERTIFICATE_VERIFY_FAILED", 9, "certificate is not yet valid"): "set the clocks of both machines",
    ("CERTIFICATE_VERIFY_FAILED", 62, "Hostname mismatch"): "use an address that is in it",
    ("CERTIFICATE_VERIFY_FAILED", 64, "IP address mismatch"): "use an address that is in it",
    ("CERTIFICATE_VERIFY_FAILED", 20, "unable to get local issuer certificate"): "set TORCHFT_CKPT_TLS_CA on this side",
    ("WRONG_VERSION_NUMBER", 0, ""): "it speaks plain http, and TLS is set up here",
    ("TLSV13_ALERT_CERTIFICATE_REQUIRED", 0, ""): "it wants a certificate, and we show none of the authority's",
    ("PEER_DID_NOT_RETURN_A_CERTIFICATE", 0, ""): "it shows none of the authority's",
    ("TLSV1_ALERT_UNKNOWN_CA", 0, ""): "it does not accept our certificate host.pem (unknown ca)",
    ("SSLV3_ALERT_CERTIFICATE_EXPIRED", 0, ""): "it does not accept our certificate host.pem (certificate expired)",
    ("NO_SHARED_CIPHER", 0, ""): "no TLS session was agreed on: NO_SHARED_CIPHER",
}


@pytest.mark.parametrize("said", CASES, ids=lambda said: f"{said[0]} {said[1]}")
def test_it_is_said_in_words(said: tuple[str, int, str]) -> None:
    assert CASES[said] in why_no_session(*said, authority="ca.pem", certificate="host.pem")


def test_who_names_no_authority_believes_those_of_the_machine() -> None:
    told = why_no_session("CERTIFICATE_VERIFY_FAILED", 19, "self-signed certificate", authority="", certificate="")
    assert told.startswith(
        "its certificate does not verify with the authorities of this machine: self-signed certificate;"
    )
    told = why_no_session("CERTIFICATE_VERIFY_FAILED", 62, "Mismatch for 'x'.", authority=None, certificate="")
    assert told == "its certificate does not verify: Mismatch for 'x'"
