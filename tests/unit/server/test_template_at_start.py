"""A chat template that cannot work is refused at the start, in one sentence, before the model is looked at."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from penstock.base.errors import ConfigError
from penstock.config import serve_from_kwargs
from penstock.server.assembly import given_template
from penstock.server.build import build

GOOD = "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}{% endfor %}"
BAD = {
    "{% for m in messages %}{{ m.content }}": "line 1",
    "{{ messages[0].content | shout }}": "shout",
    "{% if messages[0].content is loud %}{% endif %}": "loud",
    "{{ raise_exception('never') }}": "never",
    "{{ messages[0].content.nothing.more }}": "nothing",
    "{{ missing() }}": "missing",
    "{{ messages[9].content + 'x' }}": "refused",
    "{{ messages | length }} {# {} #}": "does not show",
    "{{ messages[0].role }}": "does not show",
    "{{ messages[0].content[:2] }}": "does not show",
    "{% for i in range(10**9) %}{{ i }}{% endfor %}": "refused",
}


@pytest.mark.parametrize("in_file", [False, True])
@pytest.mark.parametrize(("template", "said"), BAD.items())
def test_what_cannot_work_is_refused(tmp_path: Path, template: str, said: str, in_file: bool) -> None:
    path = tmp_path / "t.jinja"
    path.write_text(template)
    config = serve_from_kwargs(model="/no/such/model", chat_template=str(path) if in_file else template)
    with pytest.raises(ConfigError, match="chat_template") as caught:
        given_template(config)
    assert caught.value.field == "chat_template"
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert (str(path) in str(caught.value)) == in_file
    with pytest.raises(ConfigError, match="chat_template"):
        asyncio.run(build(config))  # the model that does not exist has not been looked for


def test_what_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"\xff\xfe\xe4{{ messages[0].content }}")
    (tmp_path / "empty").write_text("")
    (tmp_path / "prose").write_text("You are a model. Answer.")
    (tmp_path / "long").write_text("{{ messages[0].content }}" + " " * (1 << 17))
    for name in ("missing.jinja", "latin", "empty", "prose", "long", "."):
        config = serve_from_kwargs(model="/no/such/model", chat_template=str(tmp_path / name))
        with pytest.raises(ConfigError, match="chat_template: ") as caught:
            given_template(config)
        assert "\n" not in str(caught.value)


def test_what_works_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "t.jinja"
    path.write_text(GOOD)
    assert given_template(serve_from_kwargs(model="x", chat_template=str(path))) == GOOD
    assert given_template(serve_from_kwargs(model="x", chat_template=GOOD)) == GOOD
    assert given_template(serve_from_kwargs(model="x")) is None
    asks_for_system = "{% if messages[0].role != 'system' %}{{ raise_exception('needs a system') }}{% endif %}" + GOOD
    with pytest.raises(ConfigError, match="needs a system"):
        given_template(serve_from_kwargs(model="x", chat_template=asks_for_system))
