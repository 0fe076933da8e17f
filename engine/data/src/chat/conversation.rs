//! Conversations, and what of them a template sees.

use serde::Serialize;
use serde_json::Value as Json;

use super::jinja::{Value, Variables};

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

/// A conversation, with the tools, documents and further variables that its template is given.
#[derive(Debug, Clone)]
pub struct Conversation {
    /// The row as it was read, whose keys are in order and whose numbers have all their digits.
    row: String,
    /// The lists of messages in the row: `messages`, or `prompt` and `completion`.
    lists: &'static [&'static str],
    /// Of each message, whether the assistant says it, and whether it counts.
    turns: Vec<Turn>,
    /// Messages of the prompt, where the others are its completion.
    prompt: Option<usize>,
    has_tools: bool,
}

/// What is known of a message without its template.
#[derive(Debug, Clone, Copy)]
pub(super) struct Turn {
    pub is_answer: bool,
    /// Whether an answer counts in the loss: its `weight` is 1 or absent.
    pub counts: bool,
}

/// Names that a template is given by itself.
const TAKEN: [&str; 4] = ["messages", "tools", "documents", "add_generation_prompt"];

/// Names under which messages keep what the assistant thinks; the first is the usual one.
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

impl Conversation {
    /// The conversation of a data row: an object with `messages`, or with `prompt` and `completion` as lists of messages; and perhaps with
    /// `tools` and `documents` (lists, or texts of JSON lists) and `chat_template_kwargs` (an object of further variables).
    ///
    /// # Errors
    /// A text that is not such an object, and why.
    pub fn of_row(row: &str) -> Result<Self, String> {
        let known: Json = serde_json::from_str(row).map_err(|error| error.to_string())?;
        let lists: &[&str] = if known["prompt"].is_array() { &["prompt", "completion"] } else { &["messages"] };
        let (mut turns, mut prompt) = (Vec::new(), None);
        for name in lists {
            if *name == "completion" {
                prompt = Some(turns.len());
            }
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

    /// A conversation of messages alone.
    ///
    /// # Errors
    /// Messages that are not objects with a role.
    pub(super) fn of_messages<T: Serialize>(messages: &[T]) -> Result<Self, String> {
        let messages = serde_json::to_string(messages).map_err(|error| error.to_string())?;
        Self::of_row(&format!("{{\"messages\": {messages}}}"))
    }

    /// How many messages there are.
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

    /// Sets what a template sees of a part: as in transformers, tools and documents are none where there are none.
    pub(super) fn set_variables(&self, variables: &mut Variables<'_>, part: Part) -> Result<(), String> {
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

/// A part of a conversation to be rendered.
#[derive(Debug, Clone, Copy)]
pub(super) struct Part {
    /// The first messages.
    pub messages: usize,
    /// Whether the prompt for an answer follows.
    pub add_generation_prompt: bool,
    /// The message whose content is [`MARK`].
    pub marked: Option<usize>,
}

/// Stands for the content of a message, to see where the template puts it. No text has these characters (Unicode 16, section 23.7).
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

/// A message with what the assistant thinks under the names by which templates look for it, as transformers gives it.
fn with_reasoning(variables: &Variables<'_>, message: &Value) -> Result<Value, String> {
    let Value::Dict(fields) = message else { return Ok(message.clone()) };
    let given = |name: &&str| fields.get_str(name).filter(|value| !matches!(value, Value::None));
    let Some(reasoning) = REASONING.iter().find_map(given) else { return Ok(message.clone()) };
    let first = (Value::text("thinking"), reasoning.clone());
    let last = (Value::text(REASONING[0]), reasoning.clone());
    variables.dict(std::iter::once(first).chain(fields.entries.iter().cloned()).chain([last]))
}
