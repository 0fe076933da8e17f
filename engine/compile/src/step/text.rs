//! Serde helpers for settings that are written as strings.

use std::fmt::{self, Display};
use std::str::FromStr;

use serde::de::{Error, Unexpected, Visitor};
use serde::{Deserialize, Deserializer, Serializer};

/// Serializes with `Display`.
pub fn serialize<T: Display, S: Serializer>(value: &T, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(value)
}

/// Deserializes with `FromStr`.
pub fn deserialize<'de, T: FromStr<Err: Display>, D: Deserializer<'de>>(from: D) -> Result<T, D::Error> {
    String::deserialize(from)?.parse().map_err(D::Error::custom)
}

/// Deserializes a number or a string to a string.
pub fn number_or_text<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    let (number, text) = (|number: f64| number.to_string(), |text: &str| Ok(text.to_owned()));
    from.deserialize_any(NumberOrText { expected: "a number or a text", number, text })
}

/// Visits a number or a string.
struct NumberOrText<N, T> {
    expected: &'static str,
    number: N,
    text: T,
}

impl<V, N: Fn(f64) -> V, T: Fn(&str) -> Result<V, String>> Visitor<'_> for NumberOrText<N, T> {
    type Value = V;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.expected)
    }

    fn visit_i64<E: Error>(self, number: i64) -> Result<V, E> {
        match u64::try_from(number) {
            Ok(number) => self.visit_u64(number),
            Err(_) => Err(E::invalid_value(Unexpected::Signed(number), &self)),
        }
    }

    fn visit_u64<E: Error>(self, number: u64) -> Result<V, E> {
        // As text, to keep all digits of large numbers.
        (self.text)(&number.to_string()).map_err(E::custom)
    }

    fn visit_f64<E: Error>(self, number: f64) -> Result<V, E> {
        Ok((self.number)(number))
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<V, E> {
        (self.text)(text).map_err(E::custom)
    }
}

/// An optional number of bytes, written as a number or as text with a unit.
pub mod size {
    use gapless_alloc::draw::Bytes;
    use schemars::{Schema, SchemaGenerator, json_schema};

    use super::*;

    /// Serializes as a number.
    pub fn serialize<S: Serializer>(bytes: &Option<u64>, to: S) -> Result<S::Ok, S::Error> {
        match bytes {
            Some(bytes) => to.serialize_u64(*bytes),
            None => to.serialize_none(),
        }
    }

    /// Deserializes a number, or text with a unit.
    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u64>, D::Error> {
        let text = |text: &str| Bytes::read(text).map(Some).map_err(|why| why.to_string());
        let expected = "a number of bytes, like 4096 or \"600MiB\"";
        let value = from.deserialize_any(NumberOrText { expected, number: |_| None, text })?;
        value.map(Some).ok_or_else(|| D::Error::custom(format_args!("expected {expected}")))
    }

    /// The JSON schema.
    pub fn schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "type": ["integer", "string", "null"], "minimum": 0 })
    }
}

/// The boundaries of stages, written as a word or as a list of layers.
pub mod cut {
    use schemars::{Schema, SchemaGenerator, json_schema};
    use serde::de::SeqAccess;

    use super::*;
    use crate::partition::StagePartition;

    /// Serializes [`StagePartition::Before`] as a list, and the other partitions as a word.
    pub fn serialize<S: Serializer>(cut: &StagePartition, to: S) -> Result<S::Ok, S::Error> {
        match cut {
            StagePartition::Balanced => to.serialize_str("balanced"),
            StagePartition::Equal => to.serialize_str("equal"),
            StagePartition::Before(layers) => to.collect_seq(layers),
            StagePartition::At(_) => Err(serde::ser::Error::custom("stages that begin at nodes have no text")),
        }
    }

    /// Deserializes a word, or layers as a list or as text with commas. An empty list is [`StagePartition::Balanced`].
    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<StagePartition, D::Error> {
        from.deserialize_any(Cut)
    }

    struct Cut;

    impl<'de> Visitor<'de> for Cut {
        type Value = StagePartition;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("\"balanced\", \"equal\", or a list of layers")
        }

        fn visit_str<E: Error>(self, text: &str) -> Result<StagePartition, E> {
            Ok(match text {
                "balanced" => StagePartition::Balanced,
                "equal" => StagePartition::Equal,
                layers => StagePartition::Before(layers.split(',').map(|layer| layer.trim().to_owned()).collect()),
            })
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<StagePartition, A::Error> {
            let mut layers = Vec::new();
            while let Some(layer) = list.next_element()? {
                layers.push(layer);
            }
            Ok(if layers.is_empty() { StagePartition::Balanced } else { StagePartition::Before(layers) })
        }
    }

    /// The JSON schema.
    pub fn schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "type": ["string", "array"], "items": { "type": "string" } })
    }
}

/// The reserve for routed rows, written as a number (the factor of the balanced size) or as text.
pub mod reserve {
    use gapless_alloc::arena::Reserve;
    use gapless_alloc::draw::Bytes;
    use schemars::{Schema, SchemaGenerator, json_schema};

    use super::*;

    /// Serializes [`Reserve::Balanced`] as a number, its factor. Serializes the other reserves as text.
    pub fn serialize<S: Serializer>(reserve: &Reserve, to: S) -> Result<S::Ok, S::Error> {
        match reserve {
            Reserve::Worst => to.serialize_str("worst"),
            Reserve::Balanced { factor } => to.serialize_f64(*factor),
            Reserve::Bytes(bytes) => to.collect_str(&format_args!("{bytes}B")),
        }
    }

    /// Deserializes a number, which is the factor of [`Reserve::Balanced`], or the text of another reserve.
    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Reserve, D::Error> {
        let number = |factor| Reserve::Balanced { factor };
        let text = |text: &str| match (text, text.parse()) {
            ("worst", _) => Ok(Reserve::Worst),
            (_, Ok(factor)) => Ok(number(factor)),
            _ => Bytes::read(text)
                .map(Reserve::Bytes)
                .map_err(|why| format!("{text:?}: {why}; or \"worst\", or a factor")),
        };
        from.deserialize_any(NumberOrText { expected: "\"worst\", a factor, or bytes like \"64MiB\"", number, text })
    }

    /// The JSON schema.
    pub fn schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "type": ["number", "string"], "minimum": 0 })
    }
}
