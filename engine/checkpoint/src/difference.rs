//! Differences between two JSON values, which explain why a checkpoint does not fit.

use std::fmt;

use serde_json::Value;

/// A key whose value is not the expected one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference {
    /// Path of the value: the keys of the nested objects around it, separated by dots.
    pub key: String,
    /// The value in the checkpoint; `None` if the checkpoint lacks the key.
    pub saved: Option<Value>,
    /// The expected value; `None` if the key is not expected.
    pub expected: Option<Value>,
}

/// Returns every key whose values differ, in order. Objects are compared key by key, other values as a whole.
///
/// ```
/// use gapless_checkpoint::differences;
/// use serde_json::json;
/// let saved = json!({ "width": 384, "attention": { "heads": 6 } });
/// let expected = json!({ "width": 384, "attention": { "heads": 8 }, "layers": 2 });
/// let told: Vec<String> = differences(&saved, &expected).iter().map(|difference| difference.to_string()).collect();
/// assert_eq!(told, ["attention.heads is 6, expected 8", "layers is missing, expected 2"]);
/// ```
pub fn differences(saved: &Value, expected: &Value) -> Vec<Difference> {
    let mut found = Vec::new();
    compare("", Some(saved), Some(expected), &mut found);
    found
}

fn compare(key: &str, saved: Option<&Value>, expected: Option<&Value>, found: &mut Vec<Difference>) {
    match (saved, expected) {
        (Some(Value::Object(saved)), Some(Value::Object(expected))) => {
            let mut keys: Vec<_> = saved.keys().chain(expected.keys()).collect();
            keys.sort();
            keys.dedup();
            for name in keys {
                let below = if key.is_empty() { name.clone() } else { format!("{key}.{name}") };
                compare(&below, saved.get(name), expected.get(name), found);
            }
        }
        _ if saved == expected => {}
        _ => found.push(Difference { key: key.to_owned(), saved: saved.cloned(), expected: expected.cloned() }),
    }
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let key = if self.key.is_empty() { "it" } else { &self.key };
        match &self.saved {
            Some(saved) => write!(f, "{key} is {saved}, ")?,
            None => write!(f, "{key} is missing, ")?,
        }
        match &self.expected {
            Some(expected) => write!(f, "expected {expected}"),
            None => write!(f, "expected nothing"),
        }
    }
}
