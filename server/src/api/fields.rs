//! Typed reading of a JSON object's fields: every number has a range, every error names its
//! field, `null` means absent.

use super::error::ApiError;
use super::json::kind_of;
use serde_json::{Map, Value};

/// What a body held beyond what was asked for: tolerated, and counted in the metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tolerated {
    /// Fields that this server does not know.
    pub unknown_fields: u32,
    /// Fields that were explicitly `null`.
    pub nulls: u32,
}

/// A JSON object being read.
pub struct Fields<'a> {
    map: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    /// Reads from `map`.
    pub fn new(map: &'a Map<String, Value>) -> Self {
        Fields { map }
    }

    /// The field, unless it is absent or `null`.
    pub fn get(&self, name: &str) -> Option<&'a Value> {
        self.map.get(name).filter(|value| !value.is_null())
    }

    /// Counts what is neither in `known` nor needed.
    pub fn tolerated(&self, known: impl Fn(&str) -> bool) -> Tolerated {
        let mut tolerated = Tolerated::default();
        for (name, value) in self.map {
            if !known(name) {
                tolerated.unknown_fields += 1;
            }
            if value.is_null() {
                tolerated.nulls += 1;
            }
        }
        tolerated
    }

    /// A whole number within `min..=max`.
    pub fn integer(
        &self,
        name: &'static str,
        min: i128,
        max: i128,
    ) -> Result<Option<i128>, ApiError> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        let number = whole(value).ok_or_else(|| wrong_type(name, "an integer", value))?;
        if number < min || number > max {
            return Err(ApiError::invalid(
                "invalid_value",
                name,
                format!("`{name}` is {number}, it must be from {min} to {max}"),
            ));
        }
        Ok(Some(number))
    }

    /// A whole number within `min..=max`, as `u32`; `max` must fit.
    pub fn u32(&self, name: &'static str, min: u32, max: u32) -> Result<Option<u32>, ApiError> {
        let number = self.integer(name, i128::from(min), i128::from(max))?;
        Ok(number.map(|number| u32::try_from(number).expect("checked against a u32 range")))
    }

    /// A finite number within `min..=max`.
    pub fn number(&self, name: &'static str, min: f64, max: f64) -> Result<Option<f64>, ApiError> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        let number = value
            .as_f64()
            .filter(|number| number.is_finite())
            .ok_or_else(|| wrong_type(name, "a number", value))?;
        if number < min || number > max {
            return Err(ApiError::invalid(
                "invalid_value",
                name,
                format!("`{name}` is {number}, it must be from {min} to {max}"),
            ));
        }
        Ok(Some(number))
    }

    /// A boolean.
    pub fn flag(&self, name: &'static str) -> Result<Option<bool>, ApiError> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(*flag)),
            Some(other) => Err(wrong_type(name, "a boolean", other)),
        }
    }

    /// A string.
    pub fn text(&self, name: &'static str) -> Result<Option<&'a str>, ApiError> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(wrong_type(name, "a string", other)),
        }
    }

    /// An array.
    pub fn list(&self, name: &'static str) -> Result<Option<&'a [Value]>, ApiError> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::Array(list)) => Ok(Some(list)),
            Some(other) => Err(wrong_type(name, "an array", other)),
        }
    }
}

/// The whole number that a JSON value is; `16.0` is one, `16.5` and `"16"` are not.
pub fn whole(value: &Value) -> Option<i128> {
    if let Some(number) = value.as_i64() {
        return Some(i128::from(number));
    }
    if let Some(number) = value.as_u64() {
        return Some(i128::from(number));
    }
    // Beyond 2^53 a float no longer names one integer.
    value
        .as_f64()
        .filter(|number| number.fract() == 0.0 && number.abs() <= 9_007_199_254_740_992.0)
        .map(|number| number as i128)
}

/// 400 for a value of the wrong JSON type.
pub fn wrong_type(
    name: impl Into<std::borrow::Cow<'static, str>>,
    wanted: &str,
    value: &Value,
) -> ApiError {
    let name = name.into();
    let message = format!("`{name}` must be {wanted}, not {}", kind_of(value));
    ApiError::invalid("invalid_type", name, message)
}

/// Token ids from a JSON array, each checked against the vocabulary.
pub fn token_ids(name: &str, list: &[Value], vocabulary: u32) -> Result<Vec<u32>, ApiError> {
    let mut ids = Vec::with_capacity(list.len());
    for (place, value) in list.iter().enumerate() {
        let id = whole(value)
            .ok_or_else(|| wrong_type(format!("{name}[{place}]"), "a token id", value))?;
        if id < 0 || id >= i128::from(vocabulary) {
            return Err(ApiError::invalid(
                "invalid_token_id",
                format!("{name}[{place}]"),
                format!(
                    "`{name}[{place}]` is {id}, the model's token ids are 0 to {}",
                    vocabulary.saturating_sub(1)
                ),
            ));
        }
        ids.push(id as u32);
    }
    Ok(ids)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn object(value: Value) -> Map<String, Value> {
        match value {
            Value::Object(map) => map,
            other => panic!("not an object: {other}"),
        }
    }

    #[test]
    fn integers_have_ranges_and_exact_types() {
        let map = object(
            json!({"a": 16.0, "b": 16.5, "c": "16", "d": -1, "e": u64::MAX, "f": null, "g": 1e30}),
        );
        let fields = Fields::new(&map);
        assert_eq!(fields.u32("a", 1, 100).unwrap(), Some(16));
        assert_eq!(fields.u32("b", 1, 100).unwrap_err().code, "invalid_type");
        assert_eq!(fields.u32("c", 1, 100).unwrap_err().code, "invalid_type");
        assert_eq!(fields.u32("d", 1, 100).unwrap_err().code, "invalid_value");
        assert_eq!(fields.u32("e", 1, 100).unwrap_err().code, "invalid_value");
        assert_eq!(
            fields
                .integer("e", i128::from(i64::MIN), i128::from(u64::MAX))
                .unwrap(),
            Some(i128::from(u64::MAX))
        );
        assert_eq!(fields.u32("f", 1, 100).unwrap(), None);
        assert_eq!(fields.u32("g", 1, 100).unwrap_err().code, "invalid_type");
        assert_eq!(fields.u32("absent", 1, 100).unwrap(), None);
    }

    #[test]
    fn the_unknown_and_the_null_are_counted() {
        let map = object(json!({"known": null, "odd": 1, "odder": null}));
        let tolerated = Fields::new(&map).tolerated(|name| name == "known");
        assert_eq!(
            tolerated,
            Tolerated {
                unknown_fields: 2,
                nulls: 2
            }
        );
    }

    #[test]
    fn token_ids_are_checked_against_the_vocabulary() {
        let list = [json!(0), json!(9)];
        assert_eq!(token_ids("prompt", &list, 10).unwrap(), [0, 9]);
        for bad in [json!(10), json!(-1), json!(1.5), json!("1"), json!(null)] {
            let error = token_ids("prompt", &[json!(1), bad], 10).unwrap_err();
            assert_eq!(error.param.as_deref(), Some("prompt[1]"));
        }
    }
}
