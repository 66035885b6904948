//! Metadata of a GGUF file as typed values.
//!
//! `gguf_rs` decodes the values, but never sees the file: it reads a whole file's header into
//! memory, allocates strings by the length that they announce, and panics on tensor types that it
//! does not know. What it gets is a header made anew from the entries that the preflight accepted,
//! without the tokenizer, without long arrays and without tensors.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Cursor;

use gguf_rs::{ByteOrder, GGUFContainer};

use super::preflight::{Header, quoted};
use crate::error::{Error, Result, Status, fail};

/// More than a value for each layer is nothing that this library asks for.
const MAX_VALUES: u64 = 4096;
const MAX_ENTRY_BYTES: usize = 1 << 16;
/// Bound of the whole decoded copy: the decoder spends about 60 bytes on each byte of an array.
const MAX_BYTES: usize = 1 << 22;

/// A value, wide enough for every type of its kind.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Value {
    Unsigned(u64),
    Negative(i64),
    Float(f64),
    Bool(bool),
    Text(String),
    List(Vec<Value>),
    /// A float that is infinite or not a number.
    NotFinite,
}

impl Value {
    fn kind(&self) -> &'static str {
        match self {
            Self::Unsigned(_) => "an unsigned number",
            Self::Negative(_) => "a negative number",
            Self::Float(_) => "a float",
            Self::Bool(_) => "a bool",
            Self::Text(_) => "a string",
            Self::List(_) => "an array",
            Self::NotFinite => "a number that is not finite",
        }
    }
}

/// The value of a JSON scalar. A macro, since the decoder's JSON type has no name here.
macro_rules! scalar {
    ($json:expr) => {
        if let Some(text) = $json.as_str() {
            Value::Text(text.to_owned())
        } else if let Some(flag) = $json.as_bool() {
            Value::Bool(flag)
        } else if let Some(number) = $json.as_u64() {
            Value::Unsigned(number)
        } else if let Some(number) = $json.as_i64() {
            Value::Negative(number)
        } else {
            // JSON has no number that is not finite: the decoder leaves a null.
            $json.as_f64().map_or(Value::NotFinite, Value::Float)
        }
    };
}

/// All short values of a header by key.
pub(crate) struct Metadata {
    values: BTreeMap<String, Value>,
    left_out: BTreeSet<String>,
}

impl Metadata {
    pub fn decode(header: &Header) -> Result<Self> {
        let mut left_out = BTreeSet::new();
        let mut kept = Vec::new();
        let mut n_kept = 0u64;
        for entry in &header.entries {
            if entry.n_values > MAX_VALUES || entry.raw.len() > MAX_ENTRY_BYTES {
                left_out.insert(entry.key.to_owned());
            } else if !entry.key.starts_with("tokenizer.") {
                kept.extend_from_slice(entry.raw);
                n_kept += 1;
            }
            if kept.len() > MAX_BYTES {
                fail!(Format, "the metadata takes more than {MAX_BYTES} bytes");
            }
        }
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(kept.len() + 20)?;
        // The decoder begins behind the magic: version, tensor count, entry count.
        bytes.extend_from_slice(&3u32.to_le_bytes());
        bytes.extend_from_slice(&0u64.to_le_bytes());
        bytes.extend_from_slice(&n_kept.to_le_bytes());
        bytes.extend_from_slice(&kept);

        let reader = Box::new(Cursor::new(bytes));
        let model = GGUFContainer::new(ByteOrder::LE, reader, MAX_VALUES)
            .decode()
            .map_err(|e| Error::new(Status::Format, format!("unreadable metadata: {e}")))?;
        let mut values = BTreeMap::new();
        for (key, json) in model.metadata() {
            let value = match json.as_array() {
                Some(list) => Value::List(list.iter().map(|item| scalar!(item)).collect()),
                None => scalar!(json),
            };
            values.insert(key.clone(), value);
        }
        Ok(Self { values, left_out })
    }

    /// All keys that begin with `prefix`.
    pub fn keys_under<'a>(&'a self, prefix: &'a str) -> impl Iterator<Item = &'a str> {
        let keys = self.values.keys().chain(&self.left_out);
        keys.map(String::as_str).filter(move |key| key.starts_with(prefix))
    }

    fn get(&self, key: &str) -> Result<Option<&Value>> {
        if self.left_out.contains(key) {
            fail!(
                Format,
                "{} holds more than {MAX_VALUES} values or {MAX_ENTRY_BYTES} bytes",
                quoted(key)
            );
        }
        Ok(self.values.get(key))
    }

    pub fn text(&self, key: &str) -> Result<Option<&str>> {
        match self.get(key)? {
            None => Ok(None),
            Some(Value::Text(text)) => Ok(Some(text)),
            Some(other) => wrong_kind(key, other, "a string"),
        }
    }

    pub fn flag(&self, key: &str) -> Result<Option<bool>> {
        match self.get(key)? {
            None => Ok(None),
            Some(&Value::Bool(flag)) => Ok(Some(flag)),
            Some(other) => wrong_kind(key, other, "a bool"),
        }
    }

    /// A finite number.
    pub fn float(&self, key: &str) -> Result<Option<f64>> {
        match self.get(key)? {
            None => Ok(None),
            Some(&Value::Float(float)) => Ok(Some(float)),
            Some(&Value::Unsigned(number)) => Ok(Some(number as f64)),
            Some(&Value::Negative(number)) => Ok(Some(number as f64)),
            Some(other) => wrong_kind(key, other, "a finite number"),
        }
    }

    /// A whole number that fits u32, which is what every count in a model file is.
    pub fn count(&self, key: &str) -> Result<Option<usize>> {
        self.get(key)?.map(|value| as_count(key, value)).transpose()
    }

    pub fn required_count(&self, key: &str) -> Result<usize> {
        match self.count(key)? {
            Some(count) => Ok(count),
            None => fail!(Format, "the key {} is missing", quoted(key)),
        }
    }

    /// Counts that stand as an array, or one count that holds for all.
    pub fn counts(&self, key: &str) -> Result<Option<Counts>> {
        match self.get(key)? {
            None => Ok(None),
            Some(Value::List(list)) => {
                let counts = list.iter().map(|value| as_count(key, value)).collect::<Result<_>>();
                Ok(Some(Counts::Each(counts?)))
            }
            Some(value) => Ok(Some(Counts::Same(as_count(key, value)?))),
        }
    }
}

/// What a key that may be per layer holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Counts {
    Same(usize),
    Each(Vec<usize>),
}

impl Counts {
    /// One count for each of `n_layer` layers.
    pub fn by_layer(self, key: &str, n_layer: usize) -> Result<Vec<usize>> {
        match self {
            Self::Same(count) => Ok(vec![count; n_layer]),
            Self::Each(counts) if counts.len() == n_layer => Ok(counts),
            Self::Each(counts) => fail!(
                Format,
                "{} has {} values, expected one for each of {n_layer} layers",
                quoted(key),
                counts.len()
            ),
        }
    }
}

fn as_count(key: &str, value: &Value) -> Result<usize> {
    match *value {
        Value::Unsigned(number) if number <= u64::from(u32::MAX) => Ok(number as usize),
        Value::Unsigned(number) => {
            fail!(Format, "{} is {number}, expected at most {}", quoted(key), u32::MAX)
        }
        Value::Negative(number) => {
            fail!(Format, "{} is {number}, expected no negative number", quoted(key))
        }
        ref other => wrong_kind(key, other, "a whole number"),
    }
}

fn wrong_kind<T>(key: &str, found: &Value, expected: &str) -> Result<T> {
    fail!(Format, "{} is {}, expected {expected}", quoted(key), found.kind())
}
