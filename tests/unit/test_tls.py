"""Files of TLS that cannot be used: which of them, why, and what to do; and what a failed handshake is called."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from dlrover_adapters.cli import options as cli_options
from dlrover_adapters.cli import show_config
from dlrover_adapters.cli.settings import Settings
from dlrover_adapters.http import tls
from dlrover_core.errors import SpecError

DATA = Path(__file__).parents[1] / "integration" / "data"
CA, OTHER, MASTER, ELSEWHERE, EXPIRED, LOCKED = (
    str(DATA / name) for name in ("ca.pem", "other.pem", "master.pem", "elsewhere.pem", "expired.pem", "locked.key")
)
SEVERAL = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "HOST")


def test_good_files() -> None:
    """A certificate with its key, a CA: nothing older than TLS 1.2, and names are checked."""
    shown, trusting = tls.shown(MASTER), tls.trusting(CA)
    assert shown.minimum_version == trusting.minimum_version == ssl.TLSVersion.TLSv1_2
    assert trusting.check_hostname
    assert trusting.verify_mode == ssl.CERT_REQUIRED
    assert [one["subject"] for one in trusting.get_ca_certs()] == [((("commonName", "CA of the tests"),),)]
    assert tls.dialled("") is None
    tls.check(MASTER, "", CA, "127.0.0.2")
    tls.check(MASTER, MASTER, CA, "localhost")
    tls.check(ELSEWHERE, "", CA)


def test_strict_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """The certificates of these tests, made as the documentation says, are good enough for newer Pythons' strict checks."""
    made = ssl.create_default_context

    def strict(*arguments: str, **more: str) -> ssl.SSLContext:
        context = made(*arguments, **more)  # type: ignore[arg-type]
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        return context

    monkeypatch.setattr(ssl, "create_default_context", strict)
    tls.check(MASTER, "", CA, "127.0.0.2")


@pytest.mark.parametrize(
    ("certificate", "key", "words"),
    [
        ("missing.pem", "", "tls-cert: missing.pem cannot be read: No such file or directory"),
        (MASTER, "missing.key", "tls-key: missing.key cannot be read: No such file or directory"),
        (str(DATA), "", "cannot be read: Is a directory"),
        (MASTER, ELSEWHERE, r"tls-key: .*elsewhere.pem is not the key of the certificate .*master.pem"),
        (CA, "", "tls-key: .*ca.pem has no private key in PEM form; name the file that has"),
        (MASTER, CA, "tls-key: .*ca.pem has no private key in PEM form"),
        (__file__, MASTER, "tls-cert: .*test_tls.py has no certificate in PEM form"),
        (MASTER, LOCKED, "tls-key: .*locked.key has a passphrase, and masters start unattended"),
    ],
)
def test_bad_certificates(certificate: str, key: str, words: str) -> None:
    """Each is named, with the flag that gave it."""
    with pytest.raises(tls.BadFile, match=words):
        tls.shown(certificate, key)


@pytest.mark.parametrize(
    ("ca", "words"),
    [
        ("missing.pem", "tls-ca: missing.pem cannot be read: No such file"),
        (__file__, r"tls-ca: .*test_tls.py has no certificate in PEM form"),
        ("/dev/null", "tls-ca: /dev/null has no certificate in PEM form"),
    ],
)
def test_bad_cas(ca: str, words: str) -> None:
    """A file without a CA trusts nobody: it is refused."""
    with pytest.raises(tls.BadFile, match=words):
        tls.trusting(ca)


@pytest.mark.parametrize(
    ("certificate", "ca", "host", "words"),
    [
        (MASTER, OTHER, "", "not of the CA in --tls-ca .*name the CA that signed the masters' --tls-cert"),
        (EXPIRED, CA, "", "expired; make a new one, and check this host's clock"),
        (
            ELSEWHERE,
            CA,
            "host1",
            "Hostname mismatch, certificate is not valid for 'host1'; say HOST as the certificate does",
        ),
        (ELSEWHERE, CA, "127.0.0.1", "IP address mismatch, .*subjectAltName names what is dialled"),
    ],
)
def test_what_agents_would_not_take(certificate: str, ca: str, host: str, words: str) -> None:
    """The host of the masters says so itself, before any agent does."""
    with pytest.raises(tls.BadFile, match=f"tls-cert: .* would not be taken: .*{words}"):
        tls.check(certificate, "", ca, host)


def test_a_clock_that_is_late() -> None:
    """Not valid yet: whose clock is wrong?"""
    error = ssl.SSLCertVerificationError("not yet")
    error.verify_code, error.verify_message = 9, "certificate is not yet valid"
    assert tls.why(error) == "its certificate is not valid yet; check this host's clock"


def read(*arguments: str, shows: bool = True, dials: bool = True) -> cli_options.TlsFiles:
    """The files that a command line names."""
    options = cli_options.parse([*SEVERAL, *arguments, "train.py"])
    return cli_options.tls_files(options, shows=shows, dials=dials)


def test_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths are absolute; one that only follows needs no certificate; one half of what is needed is an error."""
    monkeypatch.chdir(DATA)
    assert read() == ("", "", "")
    assert read("--tls-cert", "master.pem", "--tls-key", "master.pem", "--tls-ca", "ca.pem") == (MASTER, MASTER, CA)
    assert read("--tls-ca", "ca.pem") == ("", "", CA)
    assert read("--tls-ca", "ca.pem", shows=False) == ("", "", CA)
    assert read("--tls-ca", "ca.pem", "--tls-cert", "elsewhere.pem", shows=False) == (ELSEWHERE, "", CA)
    assert read("--tls-cert", "elsewhere.pem", dials=False) == (ELSEWHERE, "", "")
    for line, dials, words in (
        (("--tls-cert", "master.pem"), True, "tls-ca: missing: this host's agent"),
        (("--tls-key", "master.pem"), True, "tls-cert: missing"),
        (("--tls-ca", "ca.pem"), False, "tls-cert: missing"),
        (("--tls-ca", "other.pem", "--tls-cert", "master.pem"), True, "would not be taken"),
        (("--tls-ca", "missing"), True, "tls-ca: .*missing cannot be read"),
    ):
        with pytest.raises(SpecError, match=words):
            read(*line, dials=dials)
    for line, words in (
        (("--tls-ca", "ca.pem", "--tls-key", "master.pem"), "tls-cert: missing: this host's saver needs"),
        (("--tls-ca", "ca.pem", "--tls-cert", "missing"), "tls-cert: .*missing cannot be read"),
        (("--tls-cert", "master.pem"), "tls-ca: missing: this host's agent"),
    ):
        with pytest.raises(SpecError, match=words):
            read(*line, shows=False)


def test_where_they_do_nothing() -> None:
    """On one host nothing leaves it: that is said, and files are not looked for. With --master savers show them."""
    given = ("--tls-cert", "a", "--tls-key", "b", "--tls-ca", "c")
    alone = cli_options.notes(cli_options.parse([*given, "train.py"]))
    assert alone == dict.fromkeys(("--tls-cert", "--tls-key", "--tls-ca"), "several hosts only")
    following = cli_options.notes(cli_options.parse(["--master", "h", *given, "train.py"]))
    assert following == {}


def test_they_are_told() -> None:
    """--show-config lists them with their origin, and settings carry them."""
    options = cli_options.parse(["--tls-ca", "ca.pem", "--nproc-per-node", "1", __file__])
    found = {row.name: (row.value, row.origin) for row in show_config.rows(options)}
    assert found["tls_ca"] == ("ca.pem", "--tls-ca")
    assert found["tls_cert"] == found["tls_key"] == (None, "default")
    assert Settings.__dataclass_fields__["tls_ca"].default == ""
