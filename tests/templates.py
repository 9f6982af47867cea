"""Chat templates in the style of current model families, with generation tags; written for these tests.

Each family: template, its end-of-turn token, special tokens, and what it knows: system turns, tools, thinking.
"""

import re

G, E = "{% generation %}", "{% endgeneration %}"

QWEN25 = (
    "{% if tools %}<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content }}{% else %}You are a helpful assistant."
    "{% endif %}\n\n# Tools\n<tools>{% for t in tools %}\n{{ t | tojson }}{% endfor %}\n</tools><|im_end|>\n"
    "{% elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n"
    "{% else %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}<|im_start|>user\n{{ m.content }}<|im_end|>\n"
    "{% elif m.role == 'assistant' %}<|im_start|>assistant\n" + G + "{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{% if m.content or not loop.first %}\n{% endif %}"
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|im_end|>" + E + "\n"
    "{% elif m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# thinking is kept only after the last user turn; the prompt closes the block when thinking is off
QWEN3 = (
    "{% if tools %}<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}# Tools\n<tools>"
    "{% for t in tools %}\n{{ t | tojson }}{% endfor %}\n</tools><|im_end|>\n"
    "{% elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{% endif %}"
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}<|im_start|>user\n{{ m.content }}<|im_end|>\n"
    "{% elif m.role == 'assistant' %}<|im_start|>assistant\n" + G + "{% if loop.index0 > ns.last %}<think>\n"
    "{{ (m.reasoning_content or '').strip('\n') }}\n</think>\n\n{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}<|im_end|>" + E + "\n"
    "{% elif m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)

LLAMA3 = (
    "{{ bos_token }}<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n\n"
    "{% if messages[0].role == 'system' %}{{ messages[0].content | trim }}{% endif %}<|eot_id|>"
    "{% for m in messages %}{% if m.role == 'assistant' %}<|start_header_id|>assistant<|end_header_id|>\n\n" + G + "{% if m.tool_calls %}"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
    "{% else %}{{ m.content | trim }}{% endif %}<|eot_id|>" + E + "{% elif m.role == 'tool' %}"
    "<|start_header_id|>ipython<|end_header_id|>\n\n{{ m.content | tojson }}<|eot_id|>"
    "{% elif m.role == 'user' %}<|start_header_id|>user<|end_header_id|>\n\n{% if tools and loop.first %}Given these functions:\n\n"
    "{% for t in tools %}{{ t | tojson(indent=4) }}\n\n{% endfor %}{% endif %}{{ m.content | trim }}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)

# the system turn joins the first user turn; roles must alternate
GEMMA = (
    "{{ bos_token }}{% set ns = namespace(head='', skip=0) %}{% if messages[0].role == 'system' %}"
    "{% set ns.head = messages[0].content + '\n\n' %}{% set ns.skip = 1 %}{% endif %}"
    "{% for m in messages[ns.skip:] %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}"
    "{% if m.role == 'assistant' %}<start_of_turn>model\n" + G + "{{ m.content | trim }}<end_of_turn>" + E + "\n"
    "{% else %}<start_of_turn>user\n{% if loop.first %}{{ ns.head }}{% endif %}{{ m.content | trim }}<end_of_turn>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)

# no generation prompt: the answer follows [/INST] at once
MISTRAL = (
    "{{ bos_token }}{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}{% for m in messages %}{% if m.role == 'system' %}[SYSTEM_PROMPT]{{ m.content }}[/SYSTEM_PROMPT]"
    "{% elif m.role == 'user' %}{% if tools and loop.index0 == ns.last %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST]{{ m.content }}[/INST]{% elif m.role == 'assistant' %}" + G + "{% if m.tool_calls %}[TOOL_CALLS]["
    '{% for c in m.tool_calls %}{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "{% if not loop.last %}, {% endif %}{% endfor %}]{% else %}{{ m.content }}{% endif %}</s>" + E + "{% elif m.role == 'tool' %}"
    '[TOOL_RESULTS]{"content": {{ m.content | tojson }}}[/TOOL_RESULTS]{% endif %}{% endfor %}'
)

PHI4 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}<|im_sep|>{% if m.role == 'assistant' %}" + G + "{{ m.content }}<|im_end|>" + E + ""
    "{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant<|im_sep|>{% endif %}"
)

# reasoning is cut from history; the generation prompt opens the think block
DEEPSEEK = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% elif m.role == 'user' %}<|User|>{{ m.content }}"
    "{% else %}<|Assistant|>{% if loop.last and m.reasoning_content %}<think>\n"
    + G
    + "{{ m.reasoning_content }}\n</think>\n\n{{ m.content }}"
    "<|end_of_sentence|>" + E + "{% else %}" + G + "{{ m.content }}<|end_of_sentence|>" + E + "{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|>{% if thinking is not defined or thinking %}<think>\n{% endif %}{% endif %}"
)

# channels: thinking is its own message and leaves the history
HARMONY = (
    "<|start|>system<|message|>You are ChatGPT.\nReasoning: {{ reasoning_effort | default('medium') }}<|end|>"
    "{% for m in messages %}{% if m.role in ('system', 'developer') %}<|start|>developer<|message|>{{ m.content }}<|end|>"
    "{% elif m.role == 'user' %}<|start|>user<|message|>{{ m.content }}<|end|>"
    "{% elif m.role == 'assistant' %}<|start|>assistant" + G + "{% if loop.last and m.reasoning_content %}<|channel|>analysis<|message|>"
    "{{ m.reasoning_content }}<|end|><|start|>assistant{% endif %}<|channel|>final<|message|>{{ m.content }}"
    "{% if loop.last %}<|return|>{% else %}<|end|>{% endif %}" + E + "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)

# answers have no end of turn of their own: the next role's token ends them
GLM4 = (
    "[gMASK]<sop>{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>\n"
    + G
    + "{{ m.content }}"
    + E
    + "{% else %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)

GRANITE = (
    "{% if tools %}<|start_of_role|>available_tools<|end_of_role|>{{ tools | tojson }}<|end_of_text|>\n{% endif %}"
    "{% for m in messages %}<|start_of_role|>{{ m.role }}<|end_of_role|>{% if m.role == 'assistant' %}" + G + "{{ m.content }}"
    "{% if m.tool_calls %}<|tool_call|>{{ m.tool_calls | tojson }}{% endif %}<|end_of_text|>"
    + E
    + "{% else %}{{ m.content }}<|end_of_text|>{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}"
)

OLMO = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>\n{% if m.role == 'assistant' %}"
    + G
    + "{{ m.content }}<|endoftext|>"
    + E
    + "{% if not loop.last %}\n"
    "{% endif %}{% else %}{{ m.content }}\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)

SMOLLM = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are a helpful AI assistant named SmolLM<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}" + G + "{{ m.content }}<|im_end|>" + E + ""
    "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

FAMILIES = {
    "qwen2.5": dict(template=QWEN25, eos="<|im_end|>", knows="system tools"),
    "qwen3": dict(template=QWEN3, eos="<|im_end|>", knows="system tools thinking"),
    "llama-3.1": dict(template=LLAMA3, eos="<|eot_id|>", knows="system tools", bos="<|begin_of_text|>"),
    "gemma-3": dict(template=GEMMA, eos="<end_of_turn>", knows="system", bos="<bos>"),
    "mistral": dict(template=MISTRAL, eos="</s>", knows="system tools", bos="<s>"),
    "phi-4": dict(template=PHI4, eos="<|im_end|>", knows="system"),
    "deepseek": dict(template=DEEPSEEK, eos="<|end_of_sentence|>", knows="system thinking", bos="<|begin_of_sentence|>"),
    "gpt-oss": dict(template=HARMONY, eos="<|return|>", knows="system thinking"),
    "glm-4": dict(template=GLM4, eos="<|user|>", knows="system"),
    "granite": dict(template=GRANITE, eos="<|end_of_text|>", knows="system tools"),
    "olmo-2": dict(template=OLMO, eos="<|endoftext|>", knows="system", bos="<|endoftext|>"),
    "smollm2": dict(template=SMOLLM, eos="<|im_end|>", knows="system"),
}
for _family in FAMILIES.values():  # Jinja drops a line break right after a block
    _family["template"] = _family["template"].replace("%}\n", "%}{{ '\\n' }}")
SPECIAL = re.compile(
    r"<\|\w+\|>|</?s>|<bos>|<(?:start|end)_of_turn>|\[/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS|gMASK)\]|<sop>"
)


def untag(template):
    return re.sub(r"\{% (end)?generation %\}", "", template)


def family_tokenizer(name, tags=True):
    "Bytes as tokens, the family's special tokens and template."
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    f = FAMILIES[name]
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    t = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    t.pre_tokenizer, t.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), decoders.ByteLevel()
    tok = PreTrainedTokenizerFast(tokenizer_object=t, eos_token=f["eos"], pad_token="<|pad|>", bos_token=f.get("bos"))
    tok.chat_template = f["template"] if tags else untag(f["template"])
    names = {*SPECIAL.findall(f["template"]), "<|system|>", "<|user|>", "<|assistant|>"} - {f["eos"], f.get("bos")}
    tok.add_special_tokens({"additional_special_tokens": sorted(names)})
    return tok
