//! Conversations to text, by the template of a tokenizer.
//!
//! In: a Jinja template as `tokenizer_config.json` or `chat_template.jinja` has it, and messages. Out: the text that a model was trained
//! on, and where in it answers stand. Rendered as transformers does: with trim_blocks and lstrip_blocks, loop controls, Python's methods of strings and mappings,
//! `raise_exception`, `strftime_now`, and a `tojson` that escapes nothing. Never: a rendering without end.

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde, Value};
use minijinja::{AutoEscape, Environment, Error, ErrorKind};
use serde::Serialize;
use serde_json::Value as Json;

use crate::DataError;

/// Steps of a rendering, at most: a second or so. A long conversation takes thousands.
const FUEL: u64 = 20_000_000;

/// The name of the only template.
const NAME: &str = "chat_template";

/// Stand around what a template marks as an answer, until it is rendered: characters that no text has (Unicode 16, section 23.7).
const MARKS: [char; 2] = ['\u{fdd0}', '\u{fdd1}'];

/// A turn of a conversation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Message {
    /// Who speaks: `system`, `user`, `assistant`, or what else the template knows.
    pub role: String,
    /// What is said.
    pub content: String,
}

impl Message {
    /// A turn.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: content.into() }
    }
}

/// A template of conversations.
#[derive(Debug)]
pub struct ChatTemplate {
    path: PathBuf,
    environment: Environment<'static>,
    /// Names and texts of the tokenizer's special tokens, as `bos_token`.
    special: Vec<(String, String)>,
    /// Whether it says itself what answers are.
    marks_answers: bool,
}

impl ChatTemplate {
    /// That of a Hugging Face folder, if it has one: in chat_template.jinja, else in tokenizer_config.json, where it is one text or a
    /// list by name.
    ///
    /// # Errors
    /// A tokenizer_config.json that is no JSON; a template with a mistake.
    pub fn open(folder: &Path) -> Result<Option<Self>, DataError> {
        let config = read_config(folder)?;
        let own = folder.join("chat_template.jinja");
        let named = |list: &Vec<Json>| {
            let default = list.iter().find(|one| one["name"] == "default");
            default.and_then(|one| one["template"].as_str().map(str::to_owned))
        };
        let (path, source) = match (read_if_there(&own)?, &config["chat_template"]) {
            (Some(source), _) => (own, Some(source)),
            (None, Json::String(source)) => (folder.join(CONFIG), Some(source.clone())),
            (None, Json::Array(list)) => (folder.join(CONFIG), named(list)),
            (None, _) => return Ok(None),
        };
        let Some(source) = source else { return Ok(None) };
        let special = SPECIAL.iter().filter_map(|&name| Some((name.to_owned(), special_token(&config, name)?)));
        Self::new(&source, special.collect(), &path).map(Some)
    }

    fn new(source: &str, special: Vec<(String, String)>, path: &Path) -> Result<Self, DataError> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.expect("the usual delimiters are sound"));
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        environment.set_fuel(Some(FUEL));
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", |why: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, why))
        });
        environment.add_function("strftime_now", |format: String| {
            let now = jiff::Zoned::now();
            jiff::fmt::strtime::format(&format, &now)
                .map_err(|error| Error::new(ErrorKind::InvalidOperation, error.to_string()))
        });
        environment.add_filter("tojson", to_json);
        environment.add_filter(ANSWER, |text: String| format!("{}{text}{}", MARKS[0], MARKS[1]));
        let path = path.to_owned();
        let (source, marks_answers) = with_answers(source);
        environment
            .add_template_owned(NAME, source)
            .map_err(|error| DataError::Tokenizer { path: path.clone(), reason: explain(&error) })?;
        Ok(Self { path, environment, special, marks_answers })
    }

    /// A conversation as text; with `add_generation_prompt`, up to where the assistant's next turn begins. Messages are [`Message`]s,
    /// or whatever else the template reads.
    ///
    /// # Errors
    /// What the template raises, as many do for turns that do not alternate; a rendering that takes too long.
    pub fn render<T: Serialize>(&self, messages: &[T], add_generation_prompt: bool) -> Result<String, DataError> {
        Ok(self.render_marked(messages, add_generation_prompt)?.replace(MARKS, ""))
    }

    /// A conversation as text, and the bytes of it that the assistant says, with the token that ends its turn: between the template's
    /// `{% generation %}` tags, or, of a template without them, what follows the generation prompt.
    ///
    /// # Errors
    /// As [`Self::render`]; where a template without tags writes earlier turns otherwise than alone.
    pub fn answers<T: Serialize>(&self, messages: &[T]) -> Result<(String, Vec<Range<usize>>), DataError> {
        let marked = self.render_marked(messages, false)?;
        let mut text = String::with_capacity(marked.len());
        let mut spans = Vec::new();
        for piece in marked.split_inclusive(MARKS) {
            text.push_str(piece.trim_end_matches(MARKS));
            match (piece.chars().next_back(), spans.last_mut()) {
                (Some(mark), _) if mark == MARKS[0] => spans.push(text.len()..text.len()),
                (Some(mark), Some(span)) if mark == MARKS[1] => span.end = text.len(),
                _ => {}
            }
        }
        if !self.marks_answers {
            spans = self.behind_prompts(messages, &text)?;
        }
        Ok((text, spans))
    }

    /// What each answer adds to the conversation before it, which ends with the prompt for it.
    fn behind_prompts<T: Serialize>(&self, messages: &[T], text: &str) -> Result<Vec<Range<usize>>, DataError> {
        let fail = |reason: &str| DataError::Tokenizer { path: self.path.clone(), reason: reason.into() };
        let is_answer = |message: &T| {
            serde_json::to_value(message)
                .is_ok_and(|message| message.get("role").is_some_and(|role| role == "assistant"))
        };
        let mut spans = Vec::new();
        for (index, _) in messages.iter().enumerate().filter(|(_, message)| is_answer(message)) {
            let (prompt, upto) = (self.render(&messages[..index], true)?, self.render(&messages[..=index], false)?);
            if !upto.starts_with(&prompt) || !text.starts_with(&upto) {
                return Err(fail(
                    "it writes earlier turns otherwise than alone, so what of the text is an answer is not known; put \
                     {% generation %} and {% endgeneration %} around the answers",
                ));
            }
            spans.push(prompt.len()..upto.len());
        }
        Ok(spans)
    }

    /// What the template makes, with marks around answers.
    fn render_marked<T: Serialize>(&self, messages: &[T], add_generation_prompt: bool) -> Result<String, DataError> {
        let fail = |error| DataError::Tokenizer { path: self.path.clone(), reason: explain(&error) };
        let given =
            [("messages", Value::from(Serde(messages))), ("add_generation_prompt", Value::from(add_generation_prompt))];
        let special = self.special.iter().map(|(name, token)| (name.as_str(), Value::from(token.as_str())));
        let context = Value::from_pairs(given.into_iter().chain(special));
        self.environment.get_template(NAME).and_then(|template| template.render(context)).map_err(fail)
    }
}

/// The names of special tokens in tokenizer_config.json, which templates know too.
const SPECIAL: [&str; 7] = ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// What a tokenizer's folder says beside tokenizer.json.
const CONFIG: &str = "tokenizer_config.json";

/// tokenizer_config.json; nothing if it is not there.
pub(super) fn read_config(folder: &Path) -> Result<Json, DataError> {
    let path = folder.join(CONFIG);
    let Some(text) = read_if_there(&path)? else { return Ok(Json::Null) };
    serde_json::from_str(&text).map_err(|error| DataError::Tokenizer { path, reason: error.to_string() })
}

/// A special token's text, which is given as such or in an object.
pub(super) fn special_token(config: &Json, name: &str) -> Option<String> {
    let token = &config[name];
    token.as_str().or_else(|| token["content"].as_str()).map(str::to_owned)
}

fn read_if_there(path: &Path) -> Result<Option<String>, DataError> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(DataError::read(path, error)),
    }
}

/// What went wrong, where in the template, and of what it came.
fn explain(error: &Error) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(error) = source {
        text = format!("{text}: {error}");
        source = error.source();
    }
    text
}

/// The filter that what stands between generation tags goes through.
const ANSWER: &str = "gapless_answer";

/// A template whose generation tags are those of a filter, which take the same white space around them; and whether there are any.
fn with_answers(source: &str) -> (String, bool) {
    let (mut out, mut any) = (String::with_capacity(source.len()), false);
    let mut rest = source;
    while let Some((start, end)) =
        rest.find("{%").and_then(|start| Some((start, start + rest[start..].find("%}")? + 2)))
    {
        let tag = &rest[start..end];
        let name = tag[2..tag.len() - 2].trim_matches(['-', '+', ' ', '\t', '\r', '\n']);
        out.push_str(&rest[..start]);
        match name {
            "generation" => out.push_str(&tag.replacen(name, &format!("filter {ANSWER}"), 1)),
            "endgeneration" => out.push_str(&tag.replacen(name, "endfilter", 1)),
            _ => out.push_str(tag),
        }
        any |= name == "generation";
        rest = &rest[end..];
    }
    (out + rest, any)
}

/// As Python's `json.dumps(ensure_ascii=False)`: a space behind commas and colons, and with `indent` one member a line.
fn to_json(value: &Value, options: Kwargs) -> Result<String, Error> {
    let failed = |error: serde_json::Error| Error::new(ErrorKind::BadSerialization, error.to_string());
    let indent: Option<usize> = options.get("indent")?;
    // Options of json.dumps that transformers passes on, and that change nothing here.
    let (_, _): (Option<bool>, Option<bool>) = (options.get("ensure_ascii")?, options.get("sort_keys")?);
    options.assert_all_used()?;
    let mut text = Vec::new();
    match indent {
        Some(indent) => {
            let spaces = " ".repeat(indent.min(64));
            let formatter = serde_json::ser::PrettyFormatter::with_indent(spaces.as_bytes());
            value.serialize(&mut serde_json::Serializer::with_formatter(&mut text, formatter)).map_err(failed)?;
        }
        None => value.serialize(&mut serde_json::Serializer::with_formatter(&mut text, Spaced)).map_err(failed)?,
    }
    Ok(String::from_utf8(text).expect("JSON is text"))
}

/// `{"a": 1, "b": [2, 3]}`.
struct Spaced;

impl serde_json::ser::Formatter for Spaced {
    fn begin_array_value<W: std::io::Write + ?Sized>(&mut self, writer: &mut W, first: bool) -> std::io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_key<W: std::io::Write + ?Sized>(&mut self, writer: &mut W, first: bool) -> std::io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_value<W: std::io::Write + ?Sized>(&mut self, writer: &mut W) -> std::io::Result<()> {
        writer.write_all(b": ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn render(template: &str) -> Result<String, String> {
        let special = vec![("bos_token".to_owned(), "<s>".to_owned())];
        let messages = [Message::new("user", " <é> "), Message::new("assistant", "b")];
        let template = ChatTemplate::new(template, special, Path::new("a test"));
        template.and_then(|template| template.render(&messages, true)).map_err(|error| error.to_string())
    }

    #[test]
    fn templates_render_as_transformers_does() {
        for (template, expected) in [
            ("{{ bos_token }}{{ eos_token }}{% for m in messages %}[{{ m.role }}]{% endfor %}", "<s>[user][assistant]"),
            ("{{ messages[0]['content'].strip() + messages[-1].content.upper() }}", "<é>B"),
            ("{{ messages[0] | tojson }}", r#"{"role": "user", "content": " <é> "}"#),
            ("{{ [1, {'a': none}] | tojson(indent=2) }}", "[\n  1,\n  {\n    \"a\": null\n  }\n]"),
            ("{% for m in messages %}{% if loop.index0 == 1 %}{% break %}{% endif %}x{% endfor %}", "x"),
            // Blocks take the line break behind them, and the white space in front of them on their line.
            ("  {% if add_generation_prompt %}\n  a\n  {% endif %}\nb\n", "  a\nb"),
            ("x\n{%- generation %}\n a{% endgeneration -%}\n b", "x ab"),
            ("{% if tools is defined and tools %}t{% else %}n{% endif %}", "n"),
            ("{{ strftime_now('%Y') | length }}", "4"),
        ] {
            assert_eq!(render(template).unwrap(), expected, "{template}");
        }
    }

    /// The template's text of a conversation, its answers in brackets.
    fn answers(template: &str) -> Result<String, String> {
        let messages = [("user", "é"), ("assistant", "b"), ("user", "c"), ("assistant", "d ")];
        let messages = messages.map(|(role, content)| Message::new(role, content));
        let template = ChatTemplate::new(template, Vec::new(), Path::new("a test")).unwrap();
        let (mut text, spans) = template.answers(&messages).map_err(|error| error.to_string())?;
        for span in spans.into_iter().rev() {
            text.replace_range(span.clone(), &format!("[{}]", &text[span]));
        }
        Ok(text)
    }

    #[test]
    fn answers_stand_between_tags_or_behind_prompts() {
        let tagged = "{% for m in messages %}{{ m.role[0] }}:{% if m.role == 'user' %}{{ m.content }};{% else %}\
                      {%- generation -%} {{ m.content }}.{% endgeneration %};{% endif %}{% endfor %}";
        assert_eq!(answers(tagged).unwrap(), "u:é;a:[b.];u:c;a:[d .];");
        let plain = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}.{% endfor %}\
                     {% if add_generation_prompt %}a:{% endif %}";
        assert_eq!(answers(plain).unwrap(), "u:é.a:[b.]u:c.a:[d .]");
        let last_alone = "{% for m in messages %}{{ m.content if loop.last else '' }}.{% endfor %}";
        assert!(answers(last_alone).unwrap_err().contains("{% generation %}"));
    }

    #[test]
    fn what_templates_raise_is_told() {
        assert!(render("{{ raise_exception('roles must alternate') }}").unwrap_err().contains("roles must alternate"));
        assert!(render("{% for m in messages %}").is_err());
        let endless = "{% for i in range(50000) %}{% for j in range(50000) %}{% endfor %}{% endfor %}";
        assert!(render(endless).unwrap_err().contains("fuel"));
    }
}
