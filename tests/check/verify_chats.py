"""Conversations of every kind that people train on, for templates that verification must find nothing wrong with."""

from __future__ import annotations

from verify_cases import AT, chat, message

from luthier.records import Conversation, Message, Thinking, ToolCall

LOOK = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a word up.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string"}, "depth": {"type": "integer"}},
            "required": ["word"],
        },
    },
}


def user(text: str) -> Message:
    return message("user", text)


def says(text: str, *, thought: str | None = None, calls: tuple[ToolCall, ...] = ()) -> Message:
    thoughts = () if thought is None else (Thinking(text=thought),)
    return message("assistant", *thoughts, *((text,) if text or not calls else ()), *calls)


def look(word: str, number: int = 0, **more: object) -> ToolCall:
    return ToolCall(name="look_up", arguments={"word": word, **more}, id=f"call{number:05d}")


def found(text: str, number: int = 0) -> Message:
    return Message(role="tool", parts=message("tool", text).parts, name="look_up", tool_call_id=f"call{number:05d}")


def tooled(*messages: Message) -> Conversation:
    return Conversation(messages=messages, tools=(LOOK,), address=AT)


ONE = (user("Name a wood."), says("Spruce."))
THREE = (*ONE, user("And for the back?"), says("Maple, flamed."), user("Why?"), says("It is hard.\n\nAnd it is fair."))
CHATS: dict[str, Conversation] = {
    "one": chat(*ONE),
    "three": chat(*THREE),
    "system": chat(message("system", "You build violins."), *THREE),
    "eight": chat(*(m for n in range(8) for m in (user(f"What is {n} + {n}?"), says(f"It is {2 * n}.")))),
    "long words": chat(user("Tell me more. " * 30), says("Once upon a time there was a luthier. " * 30)),
    "one letter": chat(user("a"), says("a")),
    "same words": chat(user("model"), says("assistant"), user("assistant"), says("model")),
    "punctuation": chat(user("?"), says("!")),
    "number": chat(user("2 + 2?"), says("4")),
    "lines": chat(user("One\ntwo\n\nthree"), says("a\nb\n\nc\n")),
    "begins with a line": chat(user("Go on"), says("\nAnd so on.")),
    "ends with space": chat(user("Go on "), says("And so on. ")),
    "unicode": chat(user("¿Qué madera? 木は何？"), says("Ábeto 🎻 — 槭.")),
    "code": chat(user("Code?"), says("```python\nprint('{{ x }}', \"%s\" % y)\n```")),
    "json": chat(user("JSON?"), says('{"name": "look_up", "arguments": {"a": [1, 2]}}')),
    "html": chat(user("<b>Bold?</b>"), says("<p>Yes &amp; no</p>")),
    "tags that no template has": chat(user("What is <foo>?"), says("<foo> is a tag, </foo> closes it.")),
    "colon": chat(user("Answer: what?"), says("Answer: nothing. Thought: none.")),
    "repeats itself": chat(user("Say it twice"), says("yes yes"), user("Again"), says("yes yes")),
    "quotes the question": chat(user("Spruce"), says("You said: Spruce"), user("Maple"), says("Maple Maple")),
    "empty system": chat(message("system", ""), *ONE),
    "thought": chat(user("2 + 2?"), says("4", thought="Two and two make four.")),
    "thoughts": chat(user("2 + 2?"), says("4", thought="Two, two."), user("3 + 3?"), says("6", thought="Three.")),
    "thought in the last": chat(*ONE, user("3 + 3?"), says("6", thought="Three and three.")),
    "thought in the first": chat(user("2 + 2?"), says("4", thought="Two and two."), *THREE),
    "thought of lines": chat(user("So?"), says("It is.", thought="First,\n\nthen\n- a\n- b")),
    "thought as long as the answer": chat(user("So?"), says("It is so.", thought="It is so.")),
    "blank thought": chat(user("So?"), says("It is.", thought="")),
    "call": tooled(user("Look up spruce."), says("", calls=(look("spruce"),))),
    "call and result": tooled(
        user("Look up spruce."), says("", calls=(look("spruce"),)), found("a tree"), says("It is a tree.")
    ),
    "words and a call": tooled(
        user("Look up spruce."), says("I will look.", calls=(look("spruce", depth=2),)), found("a tree"), says("Tree.")
    ),
    "two calls": tooled(
        user("Both?"),
        says("", calls=(look("spruce", 1), look("maple", 2))),
        found("a tree", 1),
        found("another tree", 2),
        says("Both are trees."),
    ),
    "call with nested arguments": tooled(
        user("Deep?"), says("", calls=(look("spruce", how={"deep": [1, 2.5, None, True], "wide": "no"}),))
    ),
    "thought and a call": tooled(
        user("Look."),
        says("", thought="I must look.", calls=(look("spruce"),)),
        found("a tree"),
        says("A tree.", thought="So it says."),
    ),
    "call loop": tooled(
        user("Look."),
        says("", calls=(look("spruce", 1),)),
        found("a tree", 1),
        says("", calls=(look("tree", 2),)),
        found("a plant", 2),
        says("A plant."),
        user("Thanks"),
        says("Welcome."),
    ),
    "tools and no call": tooled(*THREE),
    "answers in a row": chat(user("Go"), says("One."), says("Two.")),
    "questions in a row": chat(user("One?"), user("Two?"), says("Both.")),
    "last is a question": chat(*THREE, user("And?")),
    "goes on": chat(*ONE, user("And?"), says("Maple is"), continue_final_message=True),
    "some are not learned": chat(
        user("One?"), message("assistant", "No.", train=False), user("Two?"), says("Yes."), user("So?"), says("So.")
    ),
}  # fmt: skip
