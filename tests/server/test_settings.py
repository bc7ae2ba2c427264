"""Settings: flags over environment over file, and mistakes that name their key."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.settings import Settings, SettingsError, load_settings


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in list(os.environ):
        if name.startswith("SHUNTYARD_"):
            monkeypatch.delenv(name)


def load(flags: dict[str, object] | None = None, config: Path | None = None) -> Settings:
    import os

    try:
        return load_settings(
            flags or {}, config=None if config is None else str(config), environ=os.environ
        )
    finally:
        os.environ.pop("SHUNTYARD_CONFIG", None)


def test_defaults_serve_the_demo_on_loopback() -> None:
    settings = load()
    assert (settings.model, settings.host, settings.port) == (None, "127.0.0.1", 8000)
    assert settings.vllm_args() == {}


def test_flags_win_over_environment_and_environment_over_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "shuntyard.yaml"
    file.write_text("port: 1111\nhost: 0.0.0.0\nlog_level: debug\n")
    monkeypatch.setenv("SHUNTYARD_PORT", "2222")
    monkeypatch.setenv("SHUNTYARD_LOG_LEVEL", "warning")
    settings = load({"port": "3333"}, file)
    assert (settings.port, settings.log_level, settings.host) == (3333, "warning", "0.0.0.0")


def test_a_toml_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "shuntyard.toml"
    file.write_text('api_key = ["alice:sk-1"]\n[engine_args]\nswap-space = 4\n')
    settings = load(config=file)
    assert settings.keys_by_tenant == {"sk-1": "alice"}
    assert settings.vllm_args() == {"swap_space": 4}


def test_lists_in_the_environment_are_words_or_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHUNTYARD_API_KEY", "alice:a, bob:b")
    monkeypatch.setenv("SHUNTYARD_SERVED_MODEL_NAME", '["gpt-4o", "my alias"]')
    settings = load()
    assert settings.api_key == ["alice:a", "bob:b"]
    assert settings.served_model_name == ["gpt-4o", "my alias"]


def test_keys_without_a_tenant_are_tenants_of_their_own() -> None:
    settings = load({"api_key": ["sk-1", "team:sk-2", "sk-3"]})
    assert settings.keys_by_tenant == {"sk-1": "key-1", "sk-2": "team", "sk-3": "key-3"}


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"port": "99999"}, "--port (SHUNTYARD_PORT)"),
        ({"port": "eighty"}, "--port (SHUNTYARD_PORT)"),
        ({"max_body_bytes": "1"}, "--max-body-bytes (SHUNTYARD_MAX_BODY_BYTES)"),
        ({"gpu_memory_utilization": "1.5"}, "--gpu-memory-utilization"),
        ({"log_format": "xml"}, "--log-format"),
        ({"max_model_len": "-5"}, "--max-model-len"),
        ({"max_model_len": "0k"}, "--max-model-len"),
        ({"dtype": "float99"}, "--dtype"),
        ({"root_path": "prefix"}, "--root-path"),
        ({"api_key": ["alice:"]}, "--api-key"),
        ({"max_num_seq": "4"}, "did you mean max_num_seqs"),
    ],
)
def test_a_wrong_value_names_its_key(flags: dict[str, object], named: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load(flags)
    assert named in caught.value.message


def test_a_wrong_key_is_not_repeated() -> None:
    with pytest.raises(SettingsError) as caught:
        load({"api_key": ["sk-secret-value", "alice:"]})
    assert "sk-secret-value" not in caught.value.message


def test_a_misspelt_variable_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHUNTYARD_PRT", "8000")
    with pytest.raises(SettingsError, match=r"SHUNTYARD_PRT.*did you mean SHUNTYARD_PORT"):
        load()


def test_a_missing_file_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="--config"):
        load(config=tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
        ("a.yaml", "port: [1", "a.yaml cannot be read"),
        ("a.toml", "port = ", "a.toml cannot be read"),
        ("a.yaml", "- 1", "must hold names and values"),
        ("a.yaml", "prot: 1", "did you mean port"),
        ("a.yaml", "block-size: 16", "engine_args"),
    ],
)
def test_a_bad_file_is_one_line_that_names_it(
    tmp_path: Path, name: str, text: str, named: str
) -> None:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(SettingsError, match=named) as caught:
        load(config=file)
    assert len(caught.value.message.splitlines()) == 1
    assert name in caught.value.message


def test_numbers_and_hyphens_in_a_file_are_taken(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("max-model-len: 2048\nmax-num-seqs: 4\n")
    assert load(config=file).vllm_args() == {"max_model_len": "2048", "max_num_seqs": 4}


def test_engine_settings_keep_vllm_names_and_what_is_unset_is_left_to_vllm() -> None:
    settings = load({"max_model_len": "8k", "dtype": "float32", "engine_args": {"swap-space": 1}})
    assert settings.vllm_args() == {"max_model_len": "8k", "dtype": "float32", "swap_space": 1}


def test_every_setting_has_a_description_and_a_group() -> None:
    for name, info in Settings.model_fields.items():
        extra = info.json_schema_extra
        assert info.description, name
        assert isinstance(extra, dict), name
        assert extra.get("group"), name


def test_the_journal_knows_tenants_without_a_name_by_their_key() -> None:
    first = load({"api_key": ["sk-1", "alice:sk-2", "sk-3"]}).journal_identities
    second = load({"api_key": ["sk-3", "sk-1"]}).journal_identities
    assert first.keys() == {"key-1", "key-3"}
    assert (first["key-1"], first["key-3"]) == (second["key-2"], second["key-1"])
    assert not any("sk-" in identity for identity in first.values())


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"workflow_http_allow": ["10.0.0.0/8", "10.0.0"]}, "'10.0.0' is neither an address"),
        ({"searxng_url": "search.example"}, "must start with http"),
        ({"database_url": "mysql://me:secret@host/db"}, "must start with postgresql"),
        ({"database_max_connections": "1"}, "greater than or equal to 2"),
        ({"workflow_retention": "0"}, "greater than 0"),
        ({"workflow_batch_wait": "2"}, "less than or equal to 1"),
    ],
)
def test_wrong_settings_of_workflows_name_their_key(flags: dict[str, object], words: str) -> None:
    with pytest.raises(SettingsError, match=words) as caught:
        load(flags)
    assert f"--{next(iter(flags)).replace('_', '-')}" in caught.value.message
    assert "secret" not in caught.value.message


def test_the_embedded_postgres_has_a_folder_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert load().workflow_data_folder == tmp_path / "shuntyard" / "workflows"
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert load().workflow_data_folder == Path("/var/lib/shuntyard/workflows")
    assert load({"workflow_data": tmp_path}).workflow_data_folder == tmp_path
