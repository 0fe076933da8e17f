//! Conversations as text, by the chat template of a tokenizer.
//!
//! In: a Jinja template from `tokenizer_config.json` or `chat_template.jinja`, and conversations. Out: the text format
//! on which a model was trained, and the positions of answers in the text. The rendering equals that of transformers'
//! `apply_chat_template`, character for character.

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
use conversation::RenderedRange;
use jinja::{Template, Value, Variables};

pub use answers::Answers;
pub use conversation::{Conversation, Message};

/// A chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    path: PathBuf,
    template: Template,
    /// A separate template for conversations with tools, if the folder has one.
    with_tools: Option<Template>,
    /// The tokenizer's special tokens: names, such as `bos_token`, and texts.
    special: Vec<(String, String)>,
    bytes: usize,
}

impl ChatTemplate {
    /// Opens the template of a Hugging Face folder. Returns `None` if the folder has no template. The template is
    /// chat_template.jinja, or else the entry in tokenizer_config.json. That entry is either one template or a list of
    /// named templates. From a list, `tool_use` serves conversations with tools, and `default` all others.
    ///
    /// # Errors
    /// Returns an error if tokenizer_config.json is not JSON, or if the template cannot be parsed.
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

    /// Renders a conversation as text. If `add_generation_prompt`, the text ends with the beginning of the assistant's
    /// next turn. Messages are [`Message`]s, or any other values that the template can read.
    ///
    /// # Errors
    /// Returns an error if rendering takes too much work or memory, or if the template itself raises an error. Many
    /// templates raise an error if turns do not alternate.
    pub fn render<T: Serialize>(&self, messages: &[T], add_generation_prompt: bool) -> Result<String, DataError> {
        self.render_conversation(&self.conversation(messages)?, add_generation_prompt)
    }

    /// Like [`Self::render`], for a conversation that may also have tools, documents and other variables.
    ///
    /// # Errors
    /// Returns an error in the same cases as [`Self::render`].
    pub fn render_conversation(
        &self,
        conversation: &Conversation,
        add_generation_prompt: bool,
    ) -> Result<String, DataError> {
        let part = RenderedRange { messages: conversation.len(), add_generation_prompt, marked: None };
        Ok(self.render_part(conversation, part)?.0)
    }

    /// Renders a conversation as text, and returns the byte ranges of the assistant's answers. The ranges are those of
    /// [`Self::answers_of`] with [`Answers::All`].
    ///
    /// # Errors
    /// Returns an error in the same cases as [`Self::answers_of`].
    pub fn answers<T: Serialize>(&self, messages: &[T]) -> Result<(String, Vec<Range<usize>>), DataError> {
        self.answers_of(&self.conversation(messages)?, Answers::All)
    }

    fn conversation<T: Serialize>(&self, messages: &[T]) -> Result<Conversation, DataError> {
        Conversation::of_messages(messages).map_err(|reason| self.fail(reason))
    }

    fn fail(&self, reason: String) -> DataError {
        DataError::Template { path: self.path.clone(), reason }
    }

    /// Renders a part of a conversation, and returns the byte ranges of its generation blocks.
    fn render_part(
        &self,
        conversation: &Conversation,
        part: RenderedRange,
    ) -> Result<(String, Vec<Range<usize>>), DataError> {
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

/// Names of special tokens in tokenizer_config.json. They are also variables in templates.
const SPECIAL: [&str; 7] = ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// The file that has a tokenizer's settings, next to tokenizer.json.
const CONFIG: &str = "tokenizer_config.json";

/// Reads tokenizer_config.json. Returns `Null` if the file does not exist.
pub(super) fn read_config(folder: &Path) -> Result<Json, DataError> {
    read_json(folder, CONFIG)
}

/// Reads a JSON file of a folder. Returns `Null` if the file does not exist.
pub(super) fn read_json(folder: &Path, file: &str) -> Result<Json, DataError> {
    let path = folder.join(file);
    let Some(text) = read_if_there(&path)? else { return Ok(Json::Null) };
    serde_json::from_str(&text).map_err(|error| DataError::Tokenizer { path, reason: error.to_string() })
}

/// Returns the text of a special token, which may be given as a string or in an object. Returns `None` if the token is
/// missing.
pub(super) fn special_token(config: &Json, name: &str) -> Option<String> {
    let token = &config[name];
    token.as_str().or_else(|| token["content"].as_str()).map(str::to_owned)
}

/// The most bytes of a file in a tokenizer's folder.
const MAX_BYTES: u64 = 64 << 20;

fn read_if_there(path: &Path) -> Result<Option<String>, DataError> {
    match read_text(path, MAX_BYTES) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(DataError::read(path, error)),
    }
}
