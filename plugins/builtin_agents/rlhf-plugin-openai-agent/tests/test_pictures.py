"""A program gets pictures as OpenAI's client sends them."""

from rlhf_plugin_openai_agent.agent import _as_sent

from rlhf_host import Picture

PIXEL = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


def test_pictures_of_a_task_are_data_uris():
    picture = Picture.of_uri(PIXEL)
    text = {"type": "text", "text": "what?"}
    sent = _as_sent({"role": "user", "content": [{"type": "image", "image": picture}, text]})
    assert sent["content"][1] == text
    assert Picture.of_uri(sent["content"][0]["image_url"]["url"]) == picture
    assert _as_sent({"role": "user", "content": "what?"}) == {"role": "user", "content": "what?"}
