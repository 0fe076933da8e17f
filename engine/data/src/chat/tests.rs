//! Tests of templates and answers on small cases.

use std::path::Path;

use super::{Answers, ChatTemplate, Conversation, Message};

/// A conversation with everything that a row may have.
const ROW: &str = r##"{"messages": [{"role": "user", "zeta": 1, "alpha": 2.0, "content": " One é?\r\n"}, {"role": "assistant", "content": null, "tool_calls": [{"function": {"name": "look", "arguments": {"zone": "north", "city": "Oslo", "n": [1180591620717411303424, 1e16, 1e-7, -0.0, 5e-324, 0.5], "none": null, "on": true}}}]}, {"role": "tool", "content": [{"type": "text", "text": "sun"}]}, {"role": "assistant", "content": "It's \"sunny\" <b>.", "reasoning": "looked"}], "tools": [{"type": "function", "function": {"name": "look"}}], "chat_template_kwargs": {"bos_token": "<s>", "enable_thinking": false}}"##;

/// Templates, and the rendering of each with [`ROW`] by transformers 5.24.
const RENDERED: &[(&str, &str)] = &[
    // keys, tools and variables
    ("{{ messages[0] | tojson }}", "{\"role\": \"user\", \"zeta\": 1, \"alpha\": 2.0, \"content\": \" One é?\\r\\n\"}"),
    (
        "{{ messages[1].tool_calls[0].function.arguments | tojson(sort_keys=true) }}",
        "{\"city\": \"Oslo\", \"n\": [1180591620717411303424, 1e+16, 1e-07, -0.0, 5e-324, 0.5], \"none\": null, \"on\": true, \"zone\": \"north\"}",
    ),
    (
        "{% for k, v in messages[1].tool_calls[0].function.arguments.items() %}{{ k }}={{ v }};{% endfor %}",
        "zone=north;city=Oslo;n=[1180591620717411303424, 1e+16, 1e-07, -0.0, 5e-324, 0.5];none=None;on=True;",
    ),
    (
        "{{ tools | tojson }}|{{ documents is none }}|{{ enable_thinking }}|{{ bos_token }}|{{ eos_token is defined }}",
        "[{\"type\": \"function\", \"function\": {\"name\": \"look\"}}]|True|False|<s>|False",
    ),
    (
        "{{ messages[1].content is none }}{{ messages[1].content }}{{ messages[1].reasoning_content is defined }}",
        "TrueNoneFalse",
    ),
    (
        "{{ messages[3].reasoning_content }}|{{ messages[3].thinking }}|{{ messages[3] | list | join }}",
        "looked|looked|thinkingrolecontentreasoningreasoning_content",
    ),
    ("{{ messages[2].content | map(attribute='text') | join }}{{ messages[2].content is string }}", "sunFalse"),
    // JSON
    (
        "{{ messages[1].tool_calls[0].function.arguments.n | tojson }}",
        "[1180591620717411303424, 1e+16, 1e-07, -0.0, 5e-324, 0.5]",
    ),
    (
        "{{ messages[1].tool_calls[0].function.arguments.n }}",
        "[1180591620717411303424, 1e+16, 1e-07, -0.0, 5e-324, 0.5]",
    ),
    ("{{ 'é\u{2028}</s>\"\\\\\\t\\x7f\\x01🙂' | tojson }}", "\"é\u{2028}</s>\\\"\\\\\\t\u{7f}\\u0001🙂\""),
    ("{{ 'é🙂\\x7f' | tojson(ensure_ascii=true) }}", "\"\\u00e9\\ud83d\\ude42\\u007f\""),
    (
        "{{ {'b': [1, {}], 'a': (none, true)} | tojson(indent=2, sort_keys=true) }}",
        "{\n  \"a\": [\n    null,\n    true\n  ],\n  \"b\": [\n    1,\n    {}\n  ]\n}",
    ),
    ("{{ {1: 2, none: 1.0} | tojson(separators=(',', ':')) }}", "{\"1\":2,\"null\":1.0}"),
    ("{{ [] | tojson(indent=4) }}", "[]"),
    // printing
    (
        "{{ [none, true, 1.0, 'it\\'s', \"a\\\"'\", (1,), {2: 'b'}] }}",
        "[None, True, 1.0, \"it's\", 'a\"\\'', (1,), {2: 'b'}]",
    ),
    ("{{ ['\\n\\u200b\\xa0é'] }}", "['\\n\\u200b\\xa0é']"),
    (
        "{{ 2**70 }} {{ 1e22 }} {{ 1e15 }} {{ 0.1 + 0.2 }} {{ 1e-5 }} {{ none }} {{ range(3) }}",
        "1180591620717411303424 1e+22 1000000000000000.0 0.30000000000000004 1e-05 None range(0, 3)",
    ),
    (
        "{{ messages[0].keys() }}{{ ''|e }}{{ ['<'|e] }}",
        "dict_keys(['role', 'zeta', 'alpha', 'content'])[Markup('&lt;')]",
    ),
    // arithmetic
    (
        "{{ 7 // 2 }} {{ -7 // 2 }} {{ -7 % 3 }} {{ 7.5 // -2 }} {{ 4 / 2 }} {{ 2 ** 3 ** 2 }} {{ 2 ** -1 }} {{ -2 ** 2 }}",
        "3 -4 2 -4.0 2.0 64 0.5 4",
    ),
    (
        "{{ 'a' ~ 1 ~ none ~ 2.0 }} {{ 'ab' * 2 }} {{ [1] + [2] }} {{ (1,) * 2 }} {{ true + 1 }}",
        "a1None2.0 abab [1, 2] (1, 1) 2",
    ),
    (
        "{{ 1 == 1.0 == true }} {{ 1 < 2 < 3 }} {{ [1, 2] < [1, 3] }} {{ 'b' in 'abc' }} {{ 9007199254740993 == 9007199254740992.0 }}",
        "True True True True False",
    ),
    // formats
    (
        "{{ '%s has %d and %.2f%%' % ('a', 3, 1.5) }}|{{ '%05d|%-5s|%+x|%r' % (7, 'é', 255, 'q') }}|{{ '%(a)s' % {'a': 1} }}",
        "a has 3 and 1.50%|00007|é    |+ff|'q'|1",
    ),
    ("{{ '%s-%s' | format('a', 2) }}|{{ '%g %e %G' % (1e6, 12345.678, 1e-10) }}", "a-2|1e+06 1.234568e+04 1E-10"),
    (
        "{{ '{} {:>5} {:05.1f} {:,} {:#x} {!r}'.format('a', 'b', 2.25, 1234567, 255, 'c') }}",
        "a     b 002.2 1,234,567 0xff 'c'",
    ),
    ("{{ '{a[b]} {0} {:{w}}|'.format(1, a={'b': 2}, w=3) if false else '{a[b]} {0}'.format(1, a={'b': 2}) }}", "2 1"),
    // texts
    (
        "{{ ' Ab cd '.strip().split() }}{{ 'a,b'.split(',', 1) }}{{ 'a-b-c'.rsplit('-', 1) }}{{ 'a\\r\\nb\\x0bc'.splitlines() }}",
        "['Ab', 'cd']['a', 'b']['a-b', 'c']['a', 'b', 'c']",
    ),
    (
        "{{ 'abc'.partition('b') }}{{ 'abc'.replace('', '-', 2) }}{{ 'abc'.find('c') }}{{ 'aXb'.swapcase() }}{{ 'they\\'re'.title() }}",
        "('a', 'b', 'c')-a-bc2AxBThey'Re",
    ),
    (
        "{{ 'ab'.startswith(('x', 'a')) }}{{ 'a'.center(4, '*') }}{{ '-5'.zfill(4) }}{{ 'ß'.upper() }}{{ 'ΑΣ'.lower() }}",
        "True*a**-005SSας",
    ),
    (
        "{{ 'a b-c'|title }}|{{ 'a\\n\\nb'|indent(2) }}|{{ 'one two three'|truncate(9, leeway=0) }}|{{ '3.7'|int }}|{{ 2.5|round }}|{{ 2.675|round(2) }}",
        "A B-C|a\n\n  b|one...|3|2.0|2.67",
    ),
    // sequences
    (
        "{{ messages[::-1][0].role }}{{ messages[-1].content[:4] }}{{ 'abcdef'[1:-1:2] }}{{ [1, 2, 3][5:] }}{{ range(9)[2:8:3] | list }}",
        "assistantIt'sbd[][2, 5]",
    ),
    (
        "{{ messages | map(attribute='role') | unique | join(',') }}|{{ messages | selectattr('role', 'equalto', 'user') | list | length }}|{{ [3, 1, 2] | sort }}{{ ['b', 'A'] | sort }}{{ {'b': 1, 'a': 2} | dictsort }}",
        "user,assistant,tool|1|[1, 2, 3]['A', 'b'][('a', 2), ('b', 1)]",
    ),
    (
        "{{ [1, 2, 3] | batch(2) | list }}{{ [1, 2, 3] | slice(2) | list }}{{ [1, 2] | sum }}{{ [[1, 2]] | map('last') | list }}{% for g in messages | groupby('role') %}{{ g.grouper }}{{ g.list | length }}{% endfor %}",
        "[[1, 2], [3]][[1, 2], [3]]3[2]assistant2tool1user1",
    ),
    // undefined
    (
        "[{{ x }}][{{ messages[0].x }}][{{ messages[0].get('x', 'd') }}][{{ x | default('d') }}][{{ 'a' if false }}]{{ x is defined }}{{ messages[0]['x'] is undefined }}",
        "[][][d][d][]FalseTrue",
    ),
    // tests
    (
        "{{ true is integer }}{{ true is number }}{{ {} is sequence }}{{ x is iterable }}{{ 'a' is in 'abc' }}{{ 4 is divisibleby 2 }}{{ 'a'|e is escaped }}{{ 1 is not none }}",
        "FalseTrueTrueTrueTrueTrueTrueTrue",
    ),
    // white space
    ("  {% if true %}\n  a\n  {% endif %}\nb\n\n", "  a\nb\n"),
    ("a\r\nb\rc\r\n", "a\nb\nc"),
    ("x {%- if true -%} a {%- endif +%}\n b", "xa\n b"),
    ("  {# c #}\n  d {#- e #}", "  d"),
    ("{% raw -%} {{ x }} {%- endraw %}\n|", "{{ x }}|"),
    ("  {%+ if true %}a{% endif %}", "  a"),
    ("{{- 'a' -}}  \n b", "ab"),
    // statements
    (
        "{% for m in messages if m.role != 'tool' %}{{ loop.index }}{{ loop.last }}{{ (loop.nextitem or {}).role }}{{ loop.length }};{% else %}none{% endfor %}",
        "1Falseassistant3;2Falseassistant3;3True3;",
    ),
    (
        "{% for x in [1, [2, [3]]] recursive %}{% if x is iterable %}<{{ loop(x) }}>{% else %}{{ x }}{{ loop.depth }}{% endif %}{% endfor %}",
        "11<22<33>>",
    ),
    (
        "{% macro f(a, b='y') %}{{ a }}{{ b }}{{ varargs }}{{ caller() if caller else '' }}{% endmacro %}{{ f(1) }}{{ f(1, 2, 3) }}{{ f(b=1, a=2) }}{% call f(0) %}c{% endcall %}",
        "1y()12(3,)21()0y()c",
    ),
    (
        "{% set ns = namespace(n=0) %}{% for i in range(3) %}{% set ns.n = ns.n + i %}{% set x = i %}{% endfor %}{{ ns.n }}[{{ x }}]",
        "3[]",
    ),
    (
        "{% set x %}a{{ 1 }}{% endset %}{{ x | upper }}{% filter upper %}b{% endfilter %}{% with y = 2 %}{{ y }}{% endwith %}",
        "A1B2",
    ),
    (
        "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% if i > 2 %}{% break %}{% endif %}{% endfor %}",
        "023",
    ),
    (
        "{% for a, (b, c) in [(1, (2, 3))] %}{{ a }}{{ b }}{{ c }}{% endfor %}{% set p, q = 5, 6 %}{{ p }}{{ q }}",
        "12356",
    ),
    (
        "{% if false %}{{ 1 | no_such }}{% endif %}{{ 'it''s' }}{{ '\\x41\\u00e9\\t\\q' }}{{ 0x1f + 1_000 }}",
        "itsAé\t\\q1031",
    ),
];

/// Templates that Jinja 3.1 rejects.
const REFUSED: &[&str] = &[
    "{{ messages[0].x.y }}",
    "{{ x.y }}",
    "{{ x + 1 }}",
    "{{ 'a' + 1 }}",
    "{{ [1, 'a'] | sort }}",
    "{{ 1 / 0 }}",
    "{{ none | length }}",
    "{{ (messages | map('upper')) | length }}",
    "{{ {[1]: 2} }}",
    "{{ '%d' % 'a' }}",
    "{{ '%s' % (1, 2) }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].pop('role') }}",
    "{{ range(100001) }}",
    "{{ raise_exception('roles must alternate') }}",
    "{{ 1 | no_such }}",
    "{{ 1 is no_such }}",
    "{% for a in 5 %}{% endfor %}",
    "{% set messages.x = 1 %}",
    "{{ x | tojson }}",
    "{% macro f() %}{% endmacro %}{{ f(1) }}",
    "{% break %}",
    "{% include 'x' %}",
    "{% if true %}",
    "{{ 'a }}",
    "{{ 1 2 }}",
    "{{ 'a' is odd }}",
    "{{ 'b'.index('a') }}",
];

fn template(source: &str) -> Result<ChatTemplate, String> {
    ChatTemplate::new(source, None, Vec::new(), Path::new("a test")).map_err(|error| error.to_string())
}

fn render(source: &str, row: &str) -> Result<String, String> {
    let conversation = Conversation::of_row(row)?;
    template(source)?.render_conversation(&conversation, false).map_err(|error| error.to_string())
}

#[test]
fn templates_render_as_transformers_does() {
    for (source, expected) in RENDERED {
        assert_eq!(render(source, ROW).as_deref(), Ok(*expected), "{source}");
    }
    assert_eq!(render("{{ strftime_now('%Y') | length }}", ROW).unwrap(), "4");
}

#[test]
fn what_jinja_refuses_is_refused() {
    for source in REFUSED {
        let error = render(source, ROW).expect_err(source);
        assert!(error.starts_with("chat template in a test: line 1: "), "{source}: {error}");
    }
    assert!(
        render("{{ raise_exception('roles must alternate') }}", ROW).unwrap_err().ends_with("roles must alternate")
    );
    assert!(
        render("a\n{% if x %}\n{{ x.y }}{% endif %}{{ y.z }}", ROW).unwrap_err().contains("line 3: 'y' is undefined")
    );
}

/// A template with an unsupported feature is an error that names the feature. It never renders as another text.
#[test]
fn what_is_not_supported_is_named() {
    for (source, named) in [
        ("{{ 2 ** 200 }}", "128 bits"),
        ("{{ [1] | random }}", "random"),
        ("{{ [1] | map('string') }}", "generator"),
        ("{{ 'a'.encode() }}", "encode"),
        ("{{ messages.__class__ }}", "__class__"),
        ("{% macro f() %}x{% generation %}a{% endgeneration %}{% endmacro %}{{ f() }}", "{% generation %}"),
    ] {
        let error = render(source, ROW).expect_err(source);
        assert!(error.contains(named), "{source}: {error}");
    }
}

/// Small templates that would need a large stack, much memory or much time.
#[test]
fn hostile_templates_end_as_errors() {
    let chain = |link: &str| format!("{{{{ 1{} }}}}", link.repeat(50_000));
    let nested = |open: &str, close: &str| format!("{{{{ {}1{} }}}}", open.repeat(20_000), close.repeat(20_000));
    let grown = |step: &str| {
        format!(
            "{{% set ns = namespace(s='a', l=[1]) %}}{{% for i in range(30000) %}}{{% set {step} %}}{{% endfor %}}x"
        )
    };
    let mut hostile =
        ["+1", "-1", "*1", "**1", " and 1", " | abs", ".a", "[0]", "()", " if 1", " is odd"].map(chain).to_vec();
    hostile.extend(
        [("(", ")"), ("[", "]"), ("not ", ""), ("-", ""), ("{1: ", "}")].map(|(open, close)| nested(open, close)),
    );
    let steps = [
        "ns.l = [ns.l]",
        "ns.l = {'a': ns.l}",
        "ns.l = (ns.l, ns.l)",
        "ns.l = ns.l + ns.l",
        "ns.s = ns.s + ns.s",
        "ns.s = ns.s ~ ns.s",
        "ns.s = ns.s * 9",
        "ns.s = [ns.s, ns.s] | join",
        "ns.s = ns.s.replace('a', 'aaa')",
        "ns.s = '%s%s' % (ns.s, ns.s)",
        "ns.s = '{0}{0}'.format(ns.s)",
    ];
    hostile.extend(steps.map(grown));
    hostile.extend([
        "{% if 1 %}".repeat(20_000) + &"{% endif %}".repeat(20_000),
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}".into(),
        "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}".into(),
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}".into(),
        "{% set s = 'a' * 10**7 %}{% for a in range(99999) %}{{ 'b' in s }}{% endfor %}".into(),
        "{% set ns = namespace(s=(1,)) %}{% for i in range(99) %}{% set ns.s = (ns.s, ns.s) %}{% endfor %}{{ {ns.s: 1} }}".into(),
    ]);
    let asked = [
        "'a' * 10**12",
        "[1] * 10**12",
        "range(10**12)",
        "'%999999999d' % 1",
        "'%.999999999f' % 1.0",
        "'{:999999999}'.format(1)",
    ];
    let asked = asked.into_iter().chain([
        "'a' | center(10**9)",
        "'a'.zfill(10**9)",
        "'a' | indent(10**9)",
        "[1] | tojson(indent=10**9)",
    ]);
    let asked = asked.chain([
        "'a'.ljust(10**9)",
        "'\\t'.expandtabs(10**9)",
        "[1] | batch(10**9, 1)",
        "[1] | slice(10**9) | list",
        "10**10**10",
    ]);
    hostile.extend(asked.map(|expression| format!("{{{{ {expression} }}}}")));
    for source in hostile {
        let error = render(&source, ROW).expect_err(&source[..source.len().min(100)]);
        assert!(error.starts_with("chat template in a test: line 1: "), "{error}");
    }
    // Long chains of nested values are dropped without recursion.
    let chain =
        "{% set ns = namespace(a=none) %}{% for i in range(50000) %}{% set ns.a = namespace(a=ns.a) %}{% endfor %}x";
    assert_eq!(render(chain, ROW).unwrap(), "x");
}

/// Renders a row, with brackets around the answers.
fn answers(source: &str, row: &str, which: Answers) -> Result<String, String> {
    let conversation = Conversation::of_row(row)?;
    let (mut text, spans) = template(source)?.answers_of(&conversation, which).map_err(|error| error.to_string())?;
    for span in spans.into_iter().rev() {
        text.replace_range(span.clone(), &format!("[{}]", &text[span]));
    }
    Ok(text)
}

const TALK: &str = r#"{"messages": [{"role": "user", "content": "é"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}, {"role": "assistant", "content": "d "}, {"role": "user", "content": "e"}]}"#;

const TAGGED: &str = "{% for m in messages %}{{ m.role[0] }}:{% if m.role == 'user' %}{{ m.content }};{% else %}\
                      {%- generation -%} {{ m.content }}.{% endgeneration %};{% endif %}{% endfor %}";

const PLAIN: &str =
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}.{% endfor %}{% if add_generation_prompt %}a:{% endif %}";

/// This template omits the assistant's reasoning in turns before the last, like Qwen3's template.
const THINKS: &str = "{% for m in messages %}{{ m.role[0] }}:{% if m.role == 'assistant' %}{% if loop.index0 >= messages | length - 1 %}\
                      ({{ m.thinking or '' }}){% endif %}{% endif %}{{ m.content }}.{% endfor %}{% if add_generation_prompt %}a:{% endif %}";

/// This template writes the system message before the user's last turn, like Mistral's templates.
const MOVES: &str = "{% for m in messages[1:] %}{{ m.role[0] }}:{% if m.role == 'user' and (messages | selectattr('role', 'eq', 'user') | list)[-1] == m %}\
                     {{ messages[0].content }}{% endif %}{{ m.content }}.{% endfor %}{% if add_generation_prompt %}a:{% endif %}";

#[test]
fn answers_stand_between_tags_or_behind_prompts() {
    let first = r#"{"messages": [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]}"#;
    let light = TALK.replace("\"b\"", "\"b\", \"weight\": 0");
    let system = TALK.replace("[{", "[{\"role\": \"system\", \"content\": \"s\"}, {");
    let completion =
        r#"{"prompt": [{"role": "user", "content": "é"}], "completion": [{"role": "assistant", "content": "b"}]}"#;
    let looks_at_first = format!("{{{{ messages[0].role[0] }}}}{PLAIN}");
    for (source, row, which, expected) in [
        (TAGGED, TALK, Answers::All, "u:é;a:[b.];u:c;a:[d .];u:e;"),
        (TAGGED, TALK, Answers::Last, "u:é;a:b.;u:c;a:[d .];"),
        (TAGGED, &light, Answers::All, "u:é;a:b.;u:c;a:[d .];u:e;"),
        (PLAIN, TALK, Answers::All, "u:é.a:[b.]u:c.a:[d .]u:e."),
        (PLAIN, TALK, Answers::Last, "u:é.a:b.u:c.a:[d .]"),
        (PLAIN, &light, Answers::All, "u:é.a:b.u:c.a:[d .]u:e."),
        (PLAIN, first, Answers::All, "a:[a.]u:b."),
        (&looks_at_first, first, Answers::All, "aa:[a.]u:b."),
        (PLAIN, completion, Answers::All, "u:é.a:[b.]"),
        (THINKS, TALK, Answers::Last, "u:é.a:b.u:c.a:[()d .]"),
        (MOVES, &system, Answers::All, "u:é.a:[b.]u:c.a:[d .]u:se."),
    ] {
        assert_eq!(answers(source, row, which).as_deref(), Ok(expected), "{source}");
    }
    let error = answers(THINKS, TALK, Answers::All).unwrap_err();
    for part in ["message 1", "more messages follow", "{% generation %}", "data.answers to \"last\""] {
        assert!(error.contains(part), "{error}");
    }
    let messages = [Message::new("user", "é"), Message::new("assistant", "b")];
    let (text, spans) = template(PLAIN).unwrap().answers(&messages).unwrap();
    assert_eq!(&text[spans[0].clone()], "b.");
}

#[test]
fn rows_say_what_a_template_is_given() {
    let given = "{{ tools | tojson }}{{ documents | tojson }}{{ x }}";
    let messages = r#"{"messages": []"#;
    for (more, expected) in [
        ("", "nullnull"),
        (r#", "tools": null, "chat_template_kwargs": null"#, "nullnull"),
        (r#", "tools": "[{\"b\": 1, \"a\": 2}]", "documents": [{"t": 1}]"#, r#"[{"b": 1, "a": 2}][{"t": 1}]"#),
        (r#", "chat_template_kwargs": {"x": [1.0]}"#, "nullnull[1.0]"),
    ] {
        assert_eq!(render(given, &format!("{messages}{more}}}")).as_deref(), Ok(expected), "{more}");
    }
    for (more, reason) in [
        (r#", "tools": {}"#, "\"tools\" is neither a list"),
        (r#", "tools": "{""#, "\"tools\" is neither a list"),
        (r#", "documents": ["a"]"#, "\"documents\" is neither a list"),
        (r#", "chat_template_kwargs": []"#, "is not an object"),
        (r#", "chat_template_kwargs": {"tools": 1}"#, "which gapless sets itself"),
    ] {
        assert!(render(given, &format!("{messages}{more}}}")).unwrap_err().contains(reason), "{more}");
    }
    for (message, reason) in [
        (r#"{"content": "a"}"#, "message 0 has no \"role\""),
        (r#"{"role": "assistant", "weight": 0.5}"#, "message 0 has the \"weight\" 0.5"),
        (r#"{"role": "assistant", "weight": true}"#, "message 0 has the \"weight\" true"),
    ] {
        let error = Conversation::of_row(&format!("{{\"messages\": [{message}]}}")).unwrap_err();
        assert!(error.contains(reason), "{error}");
    }
    let two = ChatTemplate::new("plain", Some("tools"), Vec::new(), Path::new("a test")).unwrap();
    assert_eq!(two.render_conversation(&Conversation::of_row(ROW).unwrap(), false).unwrap(), "tools");
    assert_eq!(two.render(&[Message::new("user", "a")], false).unwrap(), "plain");
}
