"""/v1/embeddings, /v1/rerank, /v1/score, /classify and /pooling of encoders, and what routes for text say there."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from penstock.config import serve_from_kwargs
from penstock.launch.llm import LLM
from penstock.server.live import LiveServer
from tests.encoders import add_modules, write_encoder

QUERY, DOCUMENTS = "where does the mill stand", ["the mill stands by the river .", "a fox", "the sea turns water"]


class Served:
    def __init__(self, model: Path, server: LiveServer) -> None:
        self.llm, self.url = LLM(model), server.url

    def post(self, path: str, status: int = 200, **body: Any) -> Any:
        found = httpx.post(self.url + path, json=body, timeout=60)
        assert found.status_code == status, found.text
        return found.json()

    def refused(self, path: str, **body: Any) -> str:
        return str(self.post(path, 400, **body)["error"]["message"])


def serve(model: Path) -> Iterator[Served]:
    with LiveServer(serve_from_kwargs(model=str(model), port=0)) as server:
        yield Served(model, server)


@pytest.fixture(scope="module")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = write_encoder(tmp_path_factory.mktemp("vectors"))
    add_modules(folder, "mean_tokens", dense=20, max_tokens=48, prompts={"query": "where : "})
    yield from serve(folder)


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield from serve(write_encoder(tmp_path_factory.mktemp("scorer"), labels=1, seed=4))


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield from serve(write_encoder(tmp_path_factory.mktemp("classes"), labels=3, seed=4))


def test_embeddings_follow_the_files_of_the_model(vectors: Served) -> None:
    want = [out.outputs.embedding for out in vectors.llm.embed(DOCUMENTS)]
    got = vectors.post("/v1/embeddings", input=DOCUMENTS)
    np.testing.assert_allclose([one["embedding"] for one in got["data"]], want, atol=1e-6)
    assert len(want[0]) == 20
    np.testing.assert_allclose(np.linalg.norm(want, axis=1), 1.0, atol=1e-6)
    ids = vectors.llm.get_tokenizer().encode(DOCUMENTS[0])
    assert ids[0] == 2
    assert ids[-1] == 3
    assert vectors.post("/v1/embeddings", input=ids)["data"][0]["embedding"] == got["data"][0]["embedding"]
    coded = vectors.post("/v1/embeddings", input=DOCUMENTS, encoding_format="base64")["data"][0]["embedding"]
    np.testing.assert_allclose(np.frombuffer(base64.b64decode(coded), "<f4"), want[0], atol=1e-6)
    short = vectors.post("/v1/embeddings", input=DOCUMENTS[0], dimensions=5)["data"][0]["embedding"]
    np.testing.assert_allclose(short, np.array(want[0][:5]) / np.linalg.norm(want[0][:5]), atol=1e-6)


def test_prompts_of_the_model_and_long_texts(vectors: Served) -> None:
    named = vectors.post("/v1/embeddings", input="the mill", prompt_name="query")["data"][0]["embedding"]
    assert named == vectors.post("/v1/embeddings", input="where : the mill")["data"][0]["embedding"]
    assert "query" in vectors.refused("/v1/embeddings", input="the mill", prompt_name="passage")
    long = "the mill " * 40
    assert "48 tokens" in vectors.refused("/v1/embeddings", input=long)
    cut = vectors.post("/v1/embeddings", input=long, truncate_prompt_tokens=-1)
    assert cut["usage"]["prompt_tokens"] == 48
    ids = vectors.llm.get_tokenizer().encode(long)
    same = vectors.post("/v1/embeddings", input=[*ids[:47], 3])
    assert same["data"][0]["embedding"] == cut["data"][0]["embedding"]


def test_cosines_rank_documents_where_there_is_no_head(vectors: Served) -> None:
    texts = np.array([out.outputs.embedding for out in vectors.llm.embed([QUERY, *DOCUMENTS])])
    want = texts[1:] @ texts[0]
    got = vectors.post("/v1/rerank", query=QUERY, documents=DOCUMENTS)
    assert [one["index"] for one in got["results"]] == np.argsort(-want).tolist()
    np.testing.assert_allclose([one["relevance_score"] for one in got["results"]], np.sort(want)[::-1], atol=1e-6)
    scores = vectors.post("/score", text_1=QUERY, text_2=DOCUMENTS)["data"]
    np.testing.assert_allclose([one["score"] for one in scores], want, atol=1e-6)
    offline = [out.outputs.score for out in vectors.llm.score(QUERY, DOCUMENTS)]
    np.testing.assert_allclose(offline, want, atol=1e-6)


def test_a_cross_encoder_reads_pairs(scorer: Served) -> None:
    tokenizer = scorer.llm.get_tokenizer()
    ids, kinds = tokenizer.encode_pair(QUERY, DOCUMENTS[0])
    assert kinds[-1] == 1
    assert ids.count(3) == 2
    prompt = {"prompt_token_ids": [i + 60 * kind for i, kind in zip(ids, kinds, strict=True)]}
    logit = scorer.llm.encode(prompt, pooling_task="classify")[0].outputs.data[0]
    want = 1 / (1 + np.exp(-float(logit)))  # one label: a sigmoid
    got = scorer.post("/v1/score", text_1=[QUERY], text_2=DOCUMENTS)
    np.testing.assert_allclose(got["data"][0]["score"], want, atol=1e-6)
    scores = [one["score"] for one in got["data"]]
    assert len(set(scores)) == 3
    assert scores == [out.outputs.score for out in scorer.llm.score(QUERY, DOCUMENTS)]
    assert got["usage"]["prompt_tokens"] == sum(len(tokenizer.encode_pair(QUERY, d)[0]) for d in DOCUMENTS)
    for path in ("/v1/rerank", "/v2/rerank", "/rerank"):
        ranked = scorer.post(path, query=QUERY, documents=[DOCUMENTS[0], {"text": DOCUMENTS[1]}, DOCUMENTS[2]], top_n=2)
        order = sorted(range(3), key=lambda i: -scores[i])[:2]
        assert [(one["index"], one["relevance_score"]) for one in ranked["results"]] == [(i, scores[i]) for i in order]
        assert ranked["results"][0]["document"] == {"text": DOCUMENTS[order[0]]}
    assert "64 tokens" in scorer.refused("/v1/score", text_1=QUERY, text_2="the mill " * 40)
    assert scorer.post("/v1/score", text_1=QUERY, text_2="the mill " * 40, truncate_prompt_tokens=-1)


def test_classes_have_names_and_shares(classifier: Served) -> None:
    got = classifier.post("/classify", input=DOCUMENTS)
    want = [out.outputs.probs for out in classifier.llm.classify(DOCUMENTS)]
    assert [one["probs"] for one in got["data"]] == want
    assert [one["label"] for one in got["data"]] == [f"class {int(np.argmax(probs))}" for probs in want]
    np.testing.assert_allclose(np.sum(want, axis=1), 1.0)
    pooled = classifier.post("/pooling", input=DOCUMENTS[0])["data"][0]["data"]
    np.testing.assert_allclose(pooled, want[0], atol=1e-6)


def test_hidden_states_of_tokens(vectors: Served) -> None:
    got = vectors.post("/pooling", input="a fox", task="token_embed")["data"][0]["data"]
    assert np.array(got).shape == (4, 32)
    np.testing.assert_allclose(got, vectors.llm.encode("a fox")[0].outputs.data, atol=1e-6)
    coded = vectors.post("/pooling", input="a fox", task="token_embed", encoding_format="base64")["data"][0]["data"]
    np.testing.assert_allclose(np.frombuffer(base64.b64decode(coded), "<f4").reshape(4, 32), got, atol=1e-6)
    assert np.array(vectors.post("/pooling", input="a fox")["data"][0]["data"]).shape == (20,)


def test_the_wrong_model_for_a_route_is_told_in_a_sentence(vectors: Served, scorer: Served, classifier: Served) -> None:
    chat = {"messages": [{"role": "user", "content": "the mill"}]}
    for path, body in (("/v1/chat/completions", chat), ("/v1/completions", {"prompt": "the mill"})):
        assert "writes none" in vectors.refused(path, **body)
    assert "no classifier's head" in vectors.refused("/classify", input="the mill")
    assert "is a classifier" in classifier.refused("/v1/embeddings", input="the mill")
    assert "3 labels" in classifier.refused("/v1/score", text_1=QUERY, text_2=DOCUMENTS)
    assert "must not be empty" in scorer.refused("/v1/rerank", query="", documents=["a"])
    assert "entries" in scorer.refused("/v1/rerank", query=QUERY, documents=[])
    assert "text_1" in scorer.refused("/v1/score", text_1=["a", "b"], text_2=DOCUMENTS)
    assert "task" in vectors.refused("/pooling", input="a", task="plugin")
