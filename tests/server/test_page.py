"""The page in a real browser: streaming, stop, retry, conversations, and hostile answers."""

from __future__ import annotations

import pytest
from live_server import ask, done


def has_text(page, n):
    """Wait until the answer has more than `n` characters."""
    for _ in range(500):
        if len(page.locator(".answer").inner_text()) > n:
            return
        page.wait_for_timeout(10)
    raise AssertionError("no text comes")


def test_a_real_answer_and_a_follow_up(page, site):
    assert page.locator("#model").inner_text() == "tiny-model"
    for i in (1, 2):
        ask(page, f"question {i}")
        done(page)
        assert page.locator(".turn.user").count() == page.locator(".turn.assistant").count() == i
    assert "40 tokens" in page.locator(".foot").last.inner_text()
    assert site.llm.engine.stats.cached_tokens > 10
    shown = page.locator("#rate").inner_text()
    assert float(shown) == pytest.approx(site.llm.engine.stats.tok_s, abs=0.1)


def test_text_comes_while_it_is_made(page, says):
    says("one two three four five six seven eight nine ten", wait=0.05)
    ask(page)
    has_text(page, 7)
    early = page.locator(".answer").inner_text()
    assert page.locator("#stop").is_visible() and not early.endswith("ten")
    done(page)
    assert page.locator(".answer").inner_text().endswith("nine ten")


def test_guesses_are_tinted_and_counted(page, says):
    says("abcdefgh" * 4, size=8)
    ask(page)
    done(page)
    marks = page.locator(".answer mark")
    assert marks.all_inner_texts() == ["abcd"] * 3
    colour = "e => getComputedStyle(e).backgroundColor"
    assert marks.first.evaluate(colour) != "rgba(0, 0, 0, 0)"
    assert page.locator("#tau").inner_text() == "2.00"
    assert page.locator("#chart div").count() == 1
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Tint what was guessed right").uncheck()
    assert marks.first.evaluate(colour) == "rgba(0, 0, 0, 0)"


HOSTILE = (
    "<script>window.hit = 1</script>",
    "<img src=x onerror='window.hit = 1'>",
    "[click](javascript:window.hit=1) [b](JaVaScRiPt:window.hit=1) [c](data:text/html,<script>1)",
    "[d]( javascript:window.hit=1) [e](java\tscript:window.hit=1) [f](//evil.example) [g](/x)",
    "![i](http://evil.example/pixel.png) <iframe src=//evil.example></iframe>",
    '[x](https://good.example/" onmouseover="window.hit=1)',
    "```html\n</code></pre><script>window.hit = 1</script>\n```",
    "<style>body { display: none }</style><link rel=stylesheet href=//evil.example/a.css>",
    "`</code><svg onload=window.hit=1>` **<b onclick=window.hit=1>x</b>**",
    "<base href=//evil.example><form action=//evil.example><button>send</button></form>",
    "&lt;script&gt; &#60;script&#62; \u202e\u0000",
    "# <h1 onclick=window.hit=1>\n> <details ontoggle=window.hit=1>\n- <a href=javascript:1>x</a>",
    "*" * 3000 + "[" * 3000 + "`" * 999 + "> " * 999,
)


@pytest.mark.parametrize("size", [5, 10_000])
def test_hostile_answers_are_text(page, says, size):
    page.on("dialog", lambda dialog: dialog.accept())
    allowed = {"P", "PRE", "CODE", "STRONG", "EM", "A", "UL", "OL", "LI", "MARK", "BLOCKQUOTE"}
    for text in HOSTILE:
        says(text, size=max(size, len(text) // 200))
        ask(page, text[:500])
        done(page)
        page.wait_for_timeout(50)
        assert page.evaluate("window.hit") is None
        inside = page.locator("#log .answer, #log .turn.user")
        for tags in inside.evaluate_all(
            "all => all.map(e => [...e.querySelectorAll('*:not(.copy)')].map(x => x.tagName))"
        ):
            assert set(tags) <= allowed | {"H3", "H4", "H5"}
        for href, rel in page.locator(".answer a").evaluate_all(
            "all => all.map(a => [a.href, a.rel])"
        ):
            assert href.startswith(("https://good.example/", "http://evil.example/pixel.png"))
            assert "noopener" in rel  # an image is a link that nobody follows by itself
        attributes = page.locator(".answer *:not(.copy)").evaluate_all(
            "all => all.flatMap(e => [...e.attributes].map(a => a.name))"
        )
        assert set(attributes) <= {"href", "target", "rel", "start"}
        user = page.locator(".turn.user").evaluate("e => e.textContent")
        # Browsers write line ends in text fields their own way, and drop NUL.
        assert user.replace("\u0000", "") == text[:500].replace("\u0000", "")
        page.get_by_role("button", name="New").click()
    page.problems[:] = [p for p in page.problems if "NUL" not in p]


MARKDOWN = """# Title

Some **bold**, *slanted* and `code`, and [a link](https://good.example/a?b=1).
Second line.

- one
- two **b**

3. three
4. four

> quoted

```python
def f(x):
    return x * 2 * 3  # not *slanted*
```
2 * 3 * 4 and snake_case_name and __init__"""


CODE = "def f(x):\n    return x * 2 * 3  # not *slanted*"


def test_markdown(page, says):
    says(MARKDOWN)
    ask(page)
    done(page)
    answer = page.locator(".answer")
    assert answer.locator("h3").inner_text() == "Title"
    assert answer.locator("strong").all_inner_texts()[:2] == ["bold", "b"]
    assert answer.locator("em").all_inner_texts() == ["slanted"]
    assert answer.locator("ul li").all_inner_texts() == ["one", "two b"]
    assert answer.locator("ol").get_attribute("start") == "3"
    assert answer.locator("blockquote").inner_text().strip() == "quoted"
    assert answer.locator("pre code").inner_text() == CODE
    assert answer.locator("a").get_attribute("href") == "https://good.example/a?b=1"
    assert "2 * 3 * 4 and snake_case_name" in answer.inner_text()


def test_stop_and_retry(page, says, site):
    says("word " * 400, size=5, wait=0.02)
    ask(page)
    has_text(page, 20)
    page.keyboard.press("Escape")
    done(page)
    assert "stopped" in page.locator(".foot").inner_text()
    part = page.locator(".answer").inner_text()
    assert 20 < len(part) < 1000
    end = 100
    while site.server.queue.n_running and end:
        page.wait_for_timeout(10)
        end -= 1
    assert end
    says("another answer")
    page.get_by_role("button", name="Retry").click()
    page.get_by_text("another answer").wait_for()
    done(page)
    assert page.locator(".turn.assistant").count() == 1 and page.locator(".retry").count() == 1


def test_retry_after_a_follow_up_question_that_failed(page, says):
    """The answer before it stays, and it is that question which is asked again."""
    says("one")
    ask(page, "first?")
    done(page)
    page.route("**/v1/chat/completions", lambda route: route.abort())
    ask(page, "second?")
    page.locator(".error").wait_for()
    page.unroute("**/v1/chat/completions")
    says("two")
    page.get_by_role("button", name="Retry").click()
    page.get_by_text("two").wait_for()
    done(page)
    expected = ["first?", "one", "second?", "two"]
    assert turns(page) == expected
    page.reload()
    assert turns(page) == expected
    page.problems[:] = [p for p in page.problems if "ERR_FAILED" not in p]


def turns(page):
    return page.locator(".turn").evaluate_all(
        "all => all.map(e => (e.querySelector('.answer') || e).textContent)"
    )


def answer_dialog(dialog, answers):
    """Accept, once all `answers` have been given."""
    if answers and not answers.pop():
        dialog.dismiss()
    else:
        dialog.accept()


def test_conversations_stay_until_they_are_forgotten(page, says):
    dialogs, answers = [], [False, False]
    page.on("dialog", lambda one: dialogs.append(one.message) or answer_dialog(one, answers))
    names = page.locator("#talks li button:first-child")
    page.get_by_role("button", name="New").click()  # nothing is there yet
    for question, answer in (("first?", "one"), ("more?", "two")):
        says(answer)
        ask(page, question)
        done(page)
    for name in ("New", "Forget all"):  # both ask first
        page.get_by_role("button", name=name).click()
    assert len(turns(page)) == 4 and len(dialogs) == 2
    page.get_by_role("button", name="New").click()
    assert turns(page) == []
    says("three")
    ask(page, "second?")
    done(page)
    assert names.all_inner_texts() == ["second?", "first?"]
    page.reload()
    assert turns(page) == ["second?", "three"]
    assert "localStorage" in page.locator("#side").inner_text()
    names.nth(1).click()
    assert turns(page) == ["first?", "one", "more?", "two"]
    says("four")
    page.get_by_role("button", name="Retry").click()
    page.get_by_text("four").wait_for()
    done(page)
    assert names.all_inner_texts() == ["first?", "second?"]
    page.get_by_role("button", name="Forget", exact=True).nth(1).click()
    page.reload()
    assert turns(page) == ["first?", "one", "more?", "four"]
    assert names.all_inner_texts() == ["first?"]
    page.get_by_role("button", name="Forget all").click()
    page.reload()
    assert turns(page) == names.all_inner_texts() == []


def test_a_question_that_is_edited_is_answered_anew(page, says):
    for question, answer in (("a?", "one"), ("b?", "two"), ("c?", "three")):
        says(answer)
        ask(page, question)
        done(page)
    edit = page.get_by_role("button", name="Edit")
    edit.nth(1).click()
    assert page.get_by_label("Question").input_value() == "b?"
    page.keyboard.press("Escape")
    assert page.get_by_label("Question").input_value() == ""
    assert len(turns(page)) == 6
    edit.nth(1).click()
    says("other")
    bodies = []
    page.on("request", lambda r: r.post_data and bodies.append(r.post_data_json["messages"]))
    ask(page, "B?")
    page.get_by_text("other").wait_for()
    done(page)
    assert turns(page) == ["a?", "one", "B?", "other"]
    assert [message["content"] for message in bodies[0]] == ["a?", "one", "B?"]


def test_answers_and_code_can_be_copied(page, says, site):
    page.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=site.url)
    says(MARKDOWN)
    ask(page)
    done(page)
    for place, text in ((".answer .copy", CODE), (".foot .copy", MARKDOWN)):
        page.locator(place).click()
        page.locator(place, has_text="Copied").wait_for()
        assert page.evaluate("navigator.clipboard.readText()") == text


def test_a_browser_that_keeps_nothing(browser, site):
    context = browser.new_context()
    context.add_init_script(
        "Object.defineProperty(window, 'localStorage', { get() { throw new Error('off'); } })"
    )
    made = context.new_page()
    problems = []
    made.on("pageerror", lambda error: problems.append(str(error)))
    made.goto(site.url)
    made.get_by_role("button", name="Settings").click()
    made.get_by_label("Seed").fill("5")
    made.keyboard.press("Escape")
    ask(made)
    done(made)
    assert "40 tokens" in made.locator(".foot").inner_text() and not problems
    context.close()


def test_a_retry_with_a_set_seed_takes_the_next_one(page, site):
    seeds = []
    page.on("request", lambda r: r.post_data and seeds.append(r.post_data_json["seed"]))
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Temperature").fill("1")
    page.get_by_label("Seed").fill("5")
    page.keyboard.press("Escape")
    ask(page)
    done(page)
    for _ in range(2):
        with page.expect_event("requestfinished"):
            page.get_by_role("button", name="Retry").click()
        done(page)
    ask(page, "another question")
    page.locator(".turn.assistant").nth(1).locator(".foot span").wait_for()
    assert seeds == [5, 6, 7, 5]


def test_both_ways_side_by_side(page, site):
    page.evaluate("() => { Math.random = () => 0.5; }")  # of some seeds the answer is empty
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Side by side with plain decoding").check()
    page.get_by_label("Temperature").fill("1")
    page.get_by_role("button", name="Done").click()
    ask(page, "a b a b")
    page.get_by_text("the same text").wait_for()
    sides = page.locator(".side")
    assert sides.locator("h2").all_inner_texts() == ["Speculation", "Plain"]
    first, second = sides.locator(".answer").all_inner_texts()
    assert first == second != ""
    assert "tau 1.00" in sides.nth(1).locator(".foot").inner_text()


def test_settings_reach_the_server(page, site, monkeypatch):
    seen = []
    original = site.server.planner.chat
    monkeypatch.setattr(site.server.planner, "chat", lambda b: seen.append(b) or original(b))
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Seed").fill("7")
    page.get_by_label("Most new tokens").fill("5")
    page.get_by_label("Theme").select_option("dark")
    page.keyboard.press("Escape")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    ask(page)
    done(page)
    (body,) = seen
    assert (body.seed, body.max_tokens, body.temperature) == (7, 5, None)
    assert [m.content for m in body.messages] == ["Be brief.", "hello"]
    page.reload()
    page.get_by_role("button", name="Settings").click()
    assert page.get_by_label("System prompt").input_value() == "Be brief."


def test_errors_are_shown(page, site):
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Temperature").fill("500")
    page.keyboard.press("Escape")
    ask(page)
    done(page)
    assert "400: temperature 500" in page.locator(".answer .error").inner_text()
    assert page.locator(".foot").inner_text() == "Retry"  # and no statistics
    assert page.locator("#rate").inner_text() == page.locator("#share").inner_text() == "–"
    page.problems[:] = [p for p in page.problems if "400" not in p]  # the browser logs the status


def test_by_keyboard_alone(page):
    # A browser gives the focus of `autofocus` with its next frame, not when the page is loaded.
    page.locator("#question:focus").wait_for()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "send"
    page.locator("#open").focus()
    page.keyboard.press("Enter")
    assert page.locator("#settings").is_visible()
    page.keyboard.press("Escape")
    assert not page.locator("#settings").is_visible()
    page.locator("#question").focus()
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    page.keyboard.press("Enter")
    done(page)
    assert page.locator(".turn.user").evaluate("e => e.textContent") == "one\ntwo"


def test_it_fits_the_screen(page, says):
    """Nothing is wider than a small window."""
    page.set_viewport_size({"width": 360, "height": 720})
    says(MARKDOWN + "\n\n" + "averyverylongword" * 12, size=11)

    def fits():
        return page.evaluate("document.documentElement.scrollWidth") <= 360

    ask(page, "Show me everything that you can write.")
    done(page)
    assert fits()
    page.get_by_role("button", name="Settings").click()
    assert fits()
    page.get_by_label("Side by side with plain decoding").check()
    page.keyboard.press("Escape")
    says("Rayleigh scattering makes the sky blue. " * 6, size=9)
    ask(page, "And side by side?")
    page.get_by_text("the same text").wait_for()
    assert fits()
