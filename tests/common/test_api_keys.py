"""Owns: keys and addresses that a user gives are usable, or refused in one line that does not hold the key."""

from __future__ import annotations

import httpx
import pytest

from marft_bridge.common.addresses import address_to_url, refuse_server_address
from marft_bridge.common.api_keys import variable_to_key

BAD_KEYS = ["sk-a\nb", "sk-a\r\nx-other: b", "clé-secrète", "\u201csk-abc\u201d", "sk-a\x00b", "sk-a\x7f"]
GOOD_ADDRESSES = ["http://127.0.0.1:8000", "https://a.example/v1", "http://[::1]:8000/v1", "http://localhost"]
BAD_ADDRESSES = [
    *("http://127.0.0.1:80a", "http://127.0.0.1:99999", "http://[::1", "http://", "http://:80", "127.0.0.1:8000"),
    *("http://exa mple:80", "http://127.0.0.1:80\r\n", "file:///etc/hosts", "http://a\tb"),
]


@pytest.mark.parametrize("key", BAD_KEYS)
def test_a_key_that_no_header_can_carry_is_refused_in_one_line_without_it(
    monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setattr("os.environ", {"MY_KEY": key})  # the system takes no NUL
    with pytest.raises(ValueError, match=r"'MY_KEY' \(api_key_env\) holds no key: .* copy it again") as caught:
        variable_to_key("MY_KEY")
    assert "\n" not in str(caught.value)
    assert key not in str(caught.value)


@pytest.mark.parametrize("key", ["sk-abc", " sk-abc", "sk-abc\n", "sk-abc\r\n"])
def test_white_space_around_a_key_is_none_of_it(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv("MY_KEY", key)
    assert variable_to_key("MY_KEY") == "sk-abc"


@pytest.mark.parametrize("key", [None, "", " \n"])
def test_a_variable_without_a_key_is_said(monkeypatch: pytest.MonkeyPatch, key: str | None) -> None:
    monkeypatch.delenv("MY_KEY", raising=False)
    if key is not None:
        monkeypatch.setenv("MY_KEY", key)
    with pytest.raises(ValueError, match=r"'MY_KEY' \(api_key_env\) is not set"):
        variable_to_key("MY_KEY")


@pytest.mark.parametrize("address", GOOD_ADDRESSES)
def test_an_address_that_passes_is_one_for_the_client(address: str) -> None:
    assert address_to_url(address).hostname == httpx.URL(address).host.strip("[]")


LOOPBACK = ["http://127.0.0.1:8000", "http://localhost:8000/v1", "http://[::1]:8000", "http://0.0.0.0:8000"]


@pytest.mark.parametrize("address", [*LOOPBACK, "https://gpu7:8000", "https://10.0.0.7"])
def test_a_key_goes_to_this_machine_or_over_tls(address: str) -> None:
    refuse_server_address(address, key=True)


@pytest.mark.parametrize("address", ["http://gpu7:8000", "http://10.0.0.7:8000/v1", "http://localhost.example:8000"])
def test_a_model_server_on_another_machine_is_asked_over_http_without_a_key_only(address: str) -> None:
    refuse_server_address(address, key=False)
    with pytest.raises(ValueError, match="a key does not go to another machine over http") as caught:
        refuse_server_address(address, key=True)
    text = str(caught.value)
    assert "\n" not in text
    assert all(way in text for way in ("--ssl-keyfile", "ssh -N -L 8000:127.0.0.1:8000", "leave out api_key_env"))


def test_a_password_in_an_address_is_refused_without_being_shown() -> None:
    with pytest.raises(ValueError, match="no user or password in an address") as caught:
        refuse_server_address("http://ada:secret@gpu7:8000", key=False)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("address", BAD_ADDRESSES)
def test_what_is_no_address_is_refused_in_one_line(address: str) -> None:
    with pytest.raises(ValueError, match="is not an address like http") as caught:
        address_to_url(address)
    assert "\n" not in str(caught.value)
