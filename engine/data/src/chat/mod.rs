//! Conversations to text, by the template of a tokenizer.
//!
//! In: a Jinja template as `tokenizer_config.json` or `chat_template.jinja` has it, and conversations. Out: the text that a model was
//! trained on, and where in it answers stand. Rendered as transformers' `apply_chat_template` does, to the character.

mod answers;
mod conversation;
mod jinja;
#[cfg(test)]
mod tests;

use std::ops::Range;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::Value as Json;

use crate::DataError;
use crate::compressed::read_text;
use conversation::Part;
use jinja::{Template, Value, Variables};

pub use answers::Answers;
pub use conversation::{Conversation, Message};

/// A template of conversations.
#[derive(Debug)]
pub struct ChatTemplate {
    path: PathBuf,
    template: Template,
    /// The one for conversations with tools, where the folder has several.
    with_tools: Option<Template>,
    /// Names and texts of the tokenizer's special tokens, as `bos_token`.
    special: Vec<(String, String)>,
    bytes: usize,
}

impl ChatTemplate {
    /// The template of a Hugging Face folder, if it has one: in chat_template.jinja, else in tokenizer_config.json, where it is one text
    /// or a list by name. Of a list, `default` is taken, and `tool_use` for conversations with tools.
    ///
    /// # Errors
    /// A tokenizer_config.json that is not JSON; a template with a mistake.
    pub fn open(folder: &Path) -> Result<Option<Self>, DataError> {
        let config = read_config(folder)?;
        let own = folder.join("chat_template.jinja");
        let named = |list: &[Json], name: &str| {
            let found = list.iter().find(|one| one["name"] == name);
            found.and_then(|one| one["template"].as_str().map(str::to_owned))
        };
        let (path, source, with_tools) = match (read_if_there(&own)?, &config["chat_template"]) {
            (Some(source), _) => (own, Some(source), None),
            (None, Json::String(source)) => (folder.join(CONFIG), Some(source.clone()), None),
            (None, Json::Array(list)) => (folder.join(CONFIG), named(list, "default"), named(list, "tool_use")),
            (None, _) => return Ok(None),
        };
        let Some(source) = source else { return Ok(None) };
        let special = SPECIAL.iter().filter_map(|&name| Some((name.to_owned(), special_token(&config, name)?)));
        Self::new(&source, with_tools.as_deref(), special.collect(), &path).map(Some)
    }

    fn new(
        source: &str,
        with_tools: Option<&str>,
        special: Vec<(String, String)>,
        path: &Path,
    ) -> Result<Self, DataError> {
        let parse =
            |source| Template::parse(source).map_err(|reason| DataError::Template { path: path.to_owned(), reason });
        Ok(Self {
            path: path.to_owned(),
            template: parse(source)?,
            with_tools: with_tools.map(parse).transpose()?,
            special,
            bytes: source.len() + with_tools.map_or(0, str::len),
        })
    }

    /// A conversation as text; with `add_generation_prompt`, up to where the assistant's next turn begins. Messages are [`Message`]s,
    /// or whatever else the template reads.
    ///
    /// # Errors
    /// What the template raises, as many do for turns that do not alternate; a rendering that takes too much work or memory.
    pub fn render<T: Serialize>(&self, messages: &[T], add_generation_prompt: bool) -> Result<String, DataError> {
        self.render_conversation(&self.conversation(messages)?, add_generation_prompt)
    }

    /// A conversation with its tools, documents and further variables as text, as [`Self::render`] writes messages alone.
    ///
    /// # Errors
    /// As [`Self::render`].
    pub fn render_conversation(
        &self,
        conversation: &Conversation,
        add_generation_prompt: bool,
    ) -> Result<String, DataError> {
        let part = Part { messages: conversation.len(), add_generation_prompt, marked: None };
        Ok(self.render_part(conversation, part)?.0)
    }

    /// A conversation as text, and the bytes of it that the assistant says, as of [`Self::answers_of`] with [`Answers::All`].
    ///
    /// # Errors
    /// As [`Self::answers_of`].
    pub fn answers<T: Serialize>(&self, messages: &[T]) -> Result<(String, Vec<Range<usize>>), DataError> {
        self.answers_of(&self.conversation(messages)?, Answers::All)
    }

    fn conversation<T: Serialize>(&self, messages: &[T]) -> Result<Conversation, DataError> {
        Conversation::of_messages(messages).map_err(|reason| self.fail(reason))
    }

    fn fail(&self, reason: String) -> DataError {
        DataError::Template { path: self.path.clone(), reason }
    }

    /// A part of a conversation as text, and the bytes of it within generation blocks.
    fn render_part(&self, conversation: &Conversation, part: Part) -> Result<(String, Vec<Range<usize>>), DataError> {
        let template = self.template_of(conversation);
        let set = |variables: &mut Variables<'_>| {
            for (name, token) in &self.special {
                variables.set(name, Value::text(token.as_str()));
            }
            conversation.set_variables(variables, part)?;
            variables.set("add_generation_prompt", Value::Bool(part.add_generation_prompt));
            Ok(())
        };
        template.render(self.bytes + conversation.bytes(), set).map_err(|reason| self.fail(reason))
    }

    fn template_of(&self, conversation: &Conversation) -> &Template {
        self.with_tools.as_ref().filter(|_| conversation.has_tools()).unwrap_or(&self.template)
    }
}

/// The names of special tokens in tokenizer_config.json, which templates know too.
const SPECIAL: [&str; 7] = ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// The file of a tokenizer's settings in addition to tokenizer.json.
const CONFIG: &str = "tokenizer_config.json";

/// tokenizer_config.json; nothing if it is not there.
pub(super) fn read_config(folder: &Path) -> Result<Json, DataError> {
    read_json(folder, CONFIG)
}

/// A JSON file of a folder; nothing if it is not there.
pub(super) fn read_json(folder: &Path, file: &str) -> Result<Json, DataError> {
    let path = folder.join(file);
    let Some(text) = read_if_there(&path)? else { return Ok(Json::Null) };
    serde_json::from_str(&text).map_err(|error| DataError::Tokenizer { path, reason: error.to_string() })
}

/// A special token's text, which is given as such or in an object.
pub(super) fn special_token(config: &Json, name: &str) -> Option<String> {
    let token = &config[name];
    token.as_str().or_else(|| token["content"].as_str()).map(str::to_owned)
}

/// Bytes of a file beside a tokenizer, at most.
const MOST_BYTES: u64 = 64 << 20;

fn read_if_there(path: &Path) -> Result<Option<String>, DataError> {
    match read_text(path, MOST_BYTES) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(DataError::read(path, error)),
    }
}
