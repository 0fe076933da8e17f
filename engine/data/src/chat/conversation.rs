//! Conversations, and the variables that they define for a template.

use serde::Serialize;
use serde_json::Value as Json;

use super::jinja::{Value, Variables};

/// A turn of a conversation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Message {
    /// The speaker: `system`, `user`, `assistant`, or another role that the template knows.
    pub role: String,
    /// The text of the turn.
    pub content: String,
}

impl Message {
    /// Creates a turn.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: content.into() }
    }
}

/// A conversation, with the tools, documents and other variables for its template.
#[derive(Debug, Clone)]
pub struct Conversation {
    /// The row as JSON text. It is kept as it was read, which preserves the order of keys and all digits of numbers.
    row: String,
    /// The lists of messages in the row: `messages`, or `prompt` and its answer.
    lists: &'static [&'static str],
    /// The properties of each message that are known without its template.
    turns: Vec<Turn>,
    /// Number of messages in the prompt; `None` if the row has no separate prompt and completion.
    prompt: Option<usize>,
    has_tools: bool,
}

/// The properties of a message that are known without its template.
#[derive(Debug, Clone, Copy)]
pub(super) struct Turn {
    pub is_answer: bool,
    /// True if the message counts in the loss: its `weight` is 1 or absent.
    pub counts: bool,
}

/// Names of variables that are set for every template.
const TAKEN: [&str; 4] = ["messages", "tools", "documents", "add_generation_prompt"];

/// Keys under which messages may store the assistant's reasoning. The first is the usual one.
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

impl Conversation {
    /// Parses the conversation of a data row, which is an object with these keys:
    /// - `messages`, or `prompt` and `completion` as lists of messages
    /// - optionally `tools` and `documents`: lists, or texts with lists in JSON
    /// - optionally `chat_template_kwargs`: an object of further variables
    ///
    /// # Errors
    /// Returns the reason if the text is not such an object.
    pub fn of_row(row: &str) -> Result<Self, String> {
        let known: Json = serde_json::from_str(row).map_err(|error| error.to_string())?;
        match known["prompt"].as_array() {
            Some(prompt) => Self::of_lists(row, &known, &["prompt", "completion"], Some(prompt.len())),
            None => Self::of_lists(row, &known, &["messages"], None),
        }
    }

    /// Parses the conversation of a data row whose messages are those of `lists`. The first `prompt` messages are the
    /// prompt, and the rest is the answer. Other keys are those of [`Self::of_row`].
    ///
    /// # Errors
    /// Returns the reason if the text is not such an object.
    pub(crate) fn with_answer(row: &str, lists: &'static [&'static str], prompt: usize) -> Result<Self, String> {
        let known: Json = serde_json::from_str(row).map_err(|error| error.to_string())?;
        Self::of_lists(row, &known, lists, Some(prompt))
    }

    fn of_lists(
        row: &str,
        known: &Json,
        lists: &'static [&'static str],
        prompt: Option<usize>,
    ) -> Result<Self, String> {
        let mut turns = Vec::new();
        for name in lists {
            let Some(messages) = known.get(name) else { return Err(format!("missing field `{name}`")) };
            let Json::Array(messages) = messages else { return Err(format!("{name:?} is not a list of messages")) };
            for message in messages {
                turns.push(Turn::of(turns.len(), message)?);
            }
        }
        let tools = known.get("tools").unwrap_or(&Json::Null);
        for (name, list) in [("tools", tools), ("documents", known.get("documents").unwrap_or(&Json::Null))] {
            let parsed = list.as_str().and_then(|text| serde_json::from_str(text).ok());
            match parsed.as_ref().unwrap_or(list) {
                Json::Null => {}
                Json::Array(items) if items.iter().all(Json::is_object) => {}
                _ => {
                    return Err(format!("{name:?} is neither a list of objects nor a string with such a list in JSON"));
                }
            }
        }
        match known.get("chat_template_kwargs") {
            None | Some(Json::Null) => {}
            Some(Json::Object(variables)) => {
                if let Some(name) = TAKEN.iter().find(|name| variables.contains_key(**name)) {
                    return Err(format!(
                        "\"chat_template_kwargs\" has {name:?}, which gapless sets itself; leave it out"
                    ));
                }
            }
            Some(_) => return Err("\"chat_template_kwargs\" is not an object".into()),
        }
        Ok(Self { row: row.to_owned(), lists, turns, prompt, has_tools: !tools.is_null() })
    }

    /// Creates a conversation of messages alone.
    ///
    /// # Errors
    /// Returns the reason if a message is not an object with a role.
    pub(super) fn of_messages<T: Serialize>(messages: &[T]) -> Result<Self, String> {
        let messages = serde_json::to_string(messages).map_err(|error| error.to_string())?;
        Self::of_row(&format!("{{\"messages\": {messages}}}"))
    }

    /// Number of messages.
    pub(super) fn len(&self) -> usize {
        self.turns.len()
    }

    pub(super) fn turns(&self) -> &[Turn] {
        &self.turns
    }

    pub(super) fn prompt(&self) -> Option<usize> {
        self.prompt
    }

    pub(super) fn has_tools(&self) -> bool {
        self.has_tools
    }

    pub(super) fn bytes(&self) -> usize {
        self.row.len()
    }

    /// Sets the variables of a template for a part of the conversation. If there are no tools or documents, their
    /// variable is `none`, as in transformers.
    pub(super) fn set_variables(&self, variables: &mut Variables<'_>, part: RenderedRange) -> Result<(), String> {
        let row = variables.parse(&self.row)?;
        let field = |name: &str| row.field(name).cloned().unwrap_or(Value::None);
        if let Value::Dict(more) = field("chat_template_kwargs") {
            for (name, value) in &more.entries {
                variables.set(name.as_str().expect("JSON's keys are texts"), value.clone());
            }
        }
        for name in ["tools", "documents"] {
            let value = match field(name) {
                Value::Str(json, _) => variables.parse(&json)?,
                value => value,
            };
            variables.set(name, value);
        }
        let mut messages = Vec::new();
        for name in self.lists {
            let Value::List(list) = field(name) else { unreachable!("{name} was a list when the row was read") };
            for message in list.items.iter().take(part.messages - messages.len()) {
                let is_marked = part.marked == Some(messages.len());
                let message = with_reasoning(variables, message)?;
                messages.push(if is_marked { marked(variables, &message)? } else { message });
            }
        }
        let messages = variables.list(messages)?;
        variables.set("messages", messages);
        Ok(())
    }
}

/// The part of a conversation that is rendered.
#[derive(Debug, Clone, Copy)]
pub(super) struct RenderedRange {
    /// Number of messages, counted from the first.
    pub messages: usize,
    /// True if the prompt for an answer follows the messages.
    pub add_generation_prompt: bool,
    /// Index of the message whose content is replaced by [`MARK`], if any.
    pub marked: Option<usize>,
}

/// A replacement for the content of a message, which shows where the template puts the content. It consists of
/// noncharacters (Unicode 16, section 23.7), which no text contains.
pub(super) const MARK: &str = "\u{fdd0}\u{fdd1}";

fn marked(variables: &Variables<'_>, message: &Value) -> Result<Value, String> {
    let Value::Dict(fields) = message else { return Ok(message.clone()) };
    let content = (Value::text("content"), Value::text(MARK));
    variables.dict(fields.entries.iter().cloned().chain([content]))
}

impl Turn {
    fn of(index: usize, message: &Json) -> Result<Self, String> {
        let Some(role) = message["role"].as_str() else { return Err(format!("message {index} has no \"role\"")) };
        let counts = match &message["weight"] {
            Json::Null => true,
            weight => match weight.as_f64() {
                Some(0.0) => false,
                Some(1.0) => true,
                _ => {
                    return Err(format!(
                        "message {index} has the \"weight\" {weight}; set it to 1, or to 0 for a message without a loss"
                    ));
                }
            },
        };
        Ok(Self { is_answer: role == "assistant", counts })
    }
}

/// Adds the assistant's reasoning to a message under every key for which templates look, as transformers does.
fn with_reasoning(variables: &Variables<'_>, message: &Value) -> Result<Value, String> {
    let Value::Dict(fields) = message else { return Ok(message.clone()) };
    let given = |name: &&str| fields.get_str(name).filter(|value| !matches!(value, Value::None));
    let Some(reasoning) = REASONING.iter().find_map(given) else { return Ok(message.clone()) };
    let first = (Value::text("thinking"), reasoning.clone());
    let last = (Value::text(REASONING[0]), reasoning.clone());
    variables.dict(std::iter::once(first).chain(fields.entries.iter().cloned()).chain([last]))
}
