"""The vendors' SDKs and our client talk to the scripted server; both must understand the same.

The SDKs judge the server: they parse every answer with their own types. The server then judges our client:
`model_ask` has the same conversation, and its answers are compared with those of the SDKs.
"""

import json
import os
import subprocess
import sys

import anthropic
import openai

URL, FAULTS, ASK, KEY = sys.argv[1], sys.argv[2], sys.argv[3], os.environ["MODEL_KEY"]
TOOLS = [
    {"name": name, "description": name, "parameters": {"type": "object", "properties": {}}}
    for name in ("ls", "read_file", "now")
]
RESULTS = ["three files", "contents of ü", "noon"]
QUESTIONS = [None, "and now?", "go on"]
checks = 0


def same(what, got, expected):
    global checks
    checks += 1
    if got != expected:
        sys.exit(f"{what} differ:\n  SDK  {expected!r}\n  ours {got!r}")


class AnthropicSdk:
    wire = "anthropic"

    def __init__(self, url, retries=0):
        self.client = anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=retries)
        self.messages = []

    def say(self, text):
        self.messages.append({"role": "user", "content": text})

    def results(self, calls, results):
        content = [{"type": "tool_result", "tool_use_id": call["id"], "content": text} for call, text in zip(calls, results)]
        self.messages.append({"role": "user", "content": content})

    def ask(self, stream):
        tools = [{"name": t["name"], "description": t["description"], "input_schema": t["parameters"]} for t in TOOLS]
        options = dict(model="m", max_tokens=500, messages=self.messages, tools=tools, system="You are careful.")
        if stream:
            with self.client.messages.stream(**options) as events:
                message = events.get_final_message()
        else:
            message = self.client.messages.create(**options)
        if message.stop_reason == "refusal":
            return {"error": "refused"}
        self.messages.append({"role": "assistant", "content": [b.model_dump(exclude_none=True) for b in message.content]})
        blocks = message.content
        usage = message.usage
        return {
            "text": "".join(b.text for b in blocks if b.type == "text"),
            "thought": "".join(b.thinking for b in blocks if b.type == "thinking"),
            "calls": [{"id": b.id, "name": b.name, "arguments": b.input} for b in blocks if b.type == "tool_use"],
            "stop": message.stop_reason,
            "usage": [usage.input_tokens, usage.output_tokens, usage.cache_read_input_tokens, usage.cache_creation_input_tokens],
        }


class ChatSdk:
    wire = "chat"

    def __init__(self, url, retries=0):
        self.client = openai.OpenAI(base_url=url + "/v1", api_key=KEY, max_retries=retries)
        self.messages = [{"role": "system", "content": "You are careful."}]

    def say(self, text):
        self.messages.append({"role": "user", "content": text})

    def results(self, calls, results):
        for call, text in zip(calls, results):
            self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})

    def ask(self, stream):
        tools = [{"type": "function", "function": tool} for tool in TOOLS]
        options = dict(model="m", messages=self.messages, tools=tools)
        thought = ""
        if stream:
            with self.client.chat.completions.stream(**options, stream_options={"include_usage": True}) as events:
                for event in events:
                    if event.type == "chunk" and event.chunk.choices:
                        thought += getattr(event.chunk.choices[0].delta, "reasoning_content", None) or ""
                try:
                    answer = events.get_final_completion()
                except openai.LengthFinishReasonError as error:
                    answer = error.completion
        else:
            answer = self.client.chat.completions.create(**options)
            thought = getattr(answer.choices[0].message, "reasoning_content", None) or ""
        choice, usage = answer.choices[0], answer.usage
        message = choice.message
        if message.refusal:
            return {"error": "refused"}
        calls = message.tool_calls or []
        echo = {"role": "assistant", "content": message.content}
        if calls:
            echo["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.function.name, "arguments": c.function.arguments}}
                for c in calls
            ]
        self.messages.append(echo)
        cached, written = usage.prompt_tokens_details.cached_tokens, usage.prompt_tokens_details.cache_write_tokens
        return {
            "text": message.content or "",
            "thought": thought,
            "calls": [{"id": c.id, "name": c.function.name, "arguments": json.loads(c.function.arguments)} for c in calls],
            "stop": {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}[choice.finish_reason],
            "usage": [usage.prompt_tokens - cached - written, usage.completion_tokens, cached, written],
        }


class ResponsesSdk:
    wire = "responses"

    def __init__(self, url, retries=0):
        self.client = openai.OpenAI(base_url=url + "/v1", api_key=KEY, max_retries=retries)
        self.items = []

    def say(self, text):
        self.items.append({"role": "user", "content": text})

    def results(self, calls, results):
        for call, text in zip(calls, results):
            self.items.append({"type": "function_call_output", "call_id": call["id"], "output": text})

    def ask(self, stream):
        tools = [{"type": "function", **tool, "strict": False} for tool in TOOLS]
        options = dict(model="m", input=self.items, tools=tools, store=False, instructions="You are careful.")
        options["include"] = ["reasoning.encrypted_content"]
        if stream:
            with self.client.responses.stream(**options) as events:
                response = None
                for event in events:
                    if event.type == "error":
                        return {"error": {"server_is_overloaded": "overloaded"}[event.code]}
                    if event.type in ("response.completed", "response.incomplete"):
                        response = event.response
        else:
            response = self.client.responses.create(**options)
        self.items += [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in response.output]
        messages = [item for item in response.output if item.type == "message"]
        if any(part.type == "refusal" for message in messages for part in message.content):
            return {"error": "refused"}
        calls = [item for item in response.output if item.type == "function_call"]
        thoughts = [part.text for item in response.output if item.type == "reasoning" for part in item.summary]
        usage = response.usage
        cached, written = usage.input_tokens_details.cached_tokens, usage.input_tokens_details.cache_write_tokens
        stop = "max_tokens" if response.status == "incomplete" else "tool_use" if calls else "end_turn"
        return {
            "text": response.output_text,
            "thought": "".join(thoughts),
            "calls": [{"id": c.call_id, "name": c.name, "arguments": json.loads(c.arguments)} for c in calls],
            "stop": stop,
            "usage": [usage.input_tokens - cached - written, usage.output_tokens, cached, written],
        }


class OurClient:
    def __init__(self, url, wire, attempts=1):
        self.command = [ASK, f"m@{url}#{wire}", str(attempts)]
        self.messages = []

    def say(self, text):
        self.messages.append({"speaker": "user", "blocks": [{"type": "text", "text": text}]})

    def results(self, calls, results):
        blocks = [
            {"type": "tool_result", "call_id": call["id"], "blocks": [{"type": "text", "text": text}]}
            for call, text in zip(calls, results)
        ]
        self.messages.append({"speaker": "user", "blocks": blocks})

    def ask(self):
        request = {"system": ["You are careful."], "tools": TOOLS, "messages": self.messages, "max_output_tokens": 500}
        done = subprocess.run(self.command, input=json.dumps(request), text=True, capture_output=True, check=True)
        answer = json.loads(done.stdout)
        if "error" in answer:
            return {"error": answer["error"]}
        blocks, usage = answer["blocks"], answer["usage"]
        self.messages.append({"speaker": "assistant", "blocks": blocks})
        return {
            "text": "".join(b["text"] for b in blocks if b["type"] == "text"),
            "thought": "".join(b["text"] for b in blocks if b["type"] == "opaque"),
            "calls": [
                {"id": b["id"], "name": b["name"], "arguments": b["arguments"]["object"]}
                for b in blocks
                if b["type"] == "tool_call"
            ],
            "stop": answer["stop"],
            "usage": [usage[key] for key in ("input", "output", "cache_read", "cache_write")],
        }


def converse(sdk, stream):
    """Four turns in step: each side answers the calls that it heard."""
    ours = OurClient(URL, sdk.wire)
    for side in (sdk, ours):
        side.say("look")
    for turn in range(4):
        theirs, mine = sdk.ask(stream), ours.ask()
        same(f"{sdk.wire}, stream={stream}, turn {turn + 1}: the answers", mine, theirs)
        if turn == 3:
            assert [call["name"] for call in mine["calls"]] == ["ls"], mine
            return
        for side in (sdk, ours):
            if mine["calls"]:
                side.results(mine["calls"], RESULTS)
            else:
                side.say(QUESTIONS[turn])


KINDS = [
    (lambda e: "maximum context length" in str(e) or "prompt is too long" in str(e), "context_overflow"),
    (lambda e: isinstance(e, (anthropic.RateLimitError, openai.RateLimitError)), "rate_limited"),
    (lambda e: getattr(e, "status_code", None) in (503, 529) or "overloaded" in str(e), "overloaded"),
    (lambda e: isinstance(e, (anthropic.InternalServerError, openai.InternalServerError)), "server_error"),
    (lambda e: isinstance(e, (anthropic.AuthenticationError, openai.AuthenticationError)), "authentication"),
    (lambda e: isinstance(e, (anthropic.BadRequestError, openai.BadRequestError)), "bad_request"),
    (lambda e: isinstance(e, openai.APIError) and "the script says so" in str(e), "overloaded"),
    (lambda e: "incomplete chunked read" in f"{e} {e.__cause__}" or "peer closed" in f"{e} {e.__cause__}", "stream_cut"),
]


def kind_of(error):
    found = [kind for test, kind in KINDS if test(error)]
    return found[0] if found else f"{type(error).__name__}: {error}"


def fail(make_sdk, wire, task, stream):
    """One attempt of each side at a fault: the SDK's exception and our error mean the same."""
    # The server counts attempts by conversation, so that each side gets its own.
    sdk, ours = make_sdk(FAULTS), OurClient(FAULTS, wire)
    sdk.say(f"{task} for the SDK, stream={stream}")
    ours.say(f"{task} for us, stream={stream}")
    try:
        theirs = sdk.ask(stream)
    except Exception as error:
        theirs = {"error": kind_of(error)}
    same(f"{wire}, {task}, stream={stream}: the errors", ours.ask(), theirs)
    return theirs


def recover(make_sdk, wire, task):
    """With retries both sides get the answer."""
    sdk, ours = make_sdk(FAULTS, 2), OurClient(FAULTS, wire, 3)
    sdk.say(f"{task} for the SDK, with retries")
    ours.say(f"{task} for us, with retries")
    theirs, mine = sdk.ask(True), ours.ask()
    same(f"{wire}, {task}: the answers after a retry", mine["text"], theirs["text"])
    same(f"{wire}, {task}: the text after a retry", mine["text"], "after " + task.split()[1])


for sdk in (AnthropicSdk, ChatSdk, ResponsesSdk):
    for stream in (True, False):
        converse(sdk(URL), stream)
        for task in ("fault 429", "fault 529", "fault 500", "fault overflow", "fault refusal", "fault expect"):
            error = fail(sdk, sdk.wire, task, stream)
            assert set(error) == {"error"}, f"{sdk.wire} {task}: {error}"
    for task in ("fault error", "fault drop"):
        assert fail(sdk, sdk.wire, task, True).get("error"), f"{sdk.wire} {task}"
    for task in ("fault 429", "fault 529", "fault 500"):
        recover(sdk, sdk.wire, task)
print(f"{checks} comparisons: the SDKs and our client agree")
