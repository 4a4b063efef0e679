//! What differs between the states of two checkpoints, place by place.

use std::collections::BTreeSet;

use serde::Serialize;
use serde_json::Value;

/// A place at which two states differ. An absent value is one that the state does not have.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StateDifference {
    /// Keys from the outside in, as `engine.optimizer.times."wte.weight"` or `engine.random.draws[1]`; empty for the
    /// whole. A key of other signs than letters, digits, `_` and `-` is quoted as in JSON.
    pub path: String,
    /// The first state's value.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub a: Option<Value>,
    /// The second state's value.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub b: Option<Value>,
}

/// The innermost places at which `a` and `b` differ: objects and arrays are gone into, all else is compared exactly, also
/// an integer with a float.
///
/// ```
/// use serde_json::json;
/// use zero_cli::inspect::compare_states;
/// let differences = compare_states(&json!({"engine": {"steps": 3}}), &json!({"engine": {"steps": 4, "skipped": 0}}));
/// assert_eq!(differences[0].path, "engine.skipped");
/// assert_eq!(differences[0].a, None);
/// assert_eq!(differences[1].path, "engine.steps");
/// ```
pub fn compare_states(a: &Value, b: &Value) -> Vec<StateDifference> {
    let mut found = Vec::new();
    compare(&mut String::new(), Some(a), Some(b), &mut found);
    found
}

fn compare(path: &mut String, a: Option<&Value>, b: Option<&Value>, found: &mut Vec<StateDifference>) {
    let depth = path.len();
    match (a, b) {
        (Some(Value::Object(a)), Some(Value::Object(b))) => {
            for key in a.keys().chain(b.keys()).collect::<BTreeSet<_>>() {
                push_key(path, key);
                compare(path, a.get(key), b.get(key), found);
                path.truncate(depth);
            }
        }
        (Some(Value::Array(a)), Some(Value::Array(b))) => {
            for at in 0..a.len().max(b.len()) {
                path.push_str(&format!("[{at}]"));
                compare(path, a.get(at), b.get(at), found);
                path.truncate(depth);
            }
        }
        _ if a == b => {}
        _ => found.push(StateDifference { path: path.clone(), a: a.cloned(), b: b.cloned() }),
    }
}

fn push_key(path: &mut String, key: &str) {
    if !path.is_empty() {
        path.push('.');
    }
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-';
    if !key.is_empty() && key.bytes().all(plain) {
        path.push_str(key);
    } else {
        path.push_str(&Value::from(key).to_string());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn places(a: Value, b: Value) -> Vec<String> {
        let show = |value: Option<Value>| value.map_or("nothing".to_string(), |value| value.to_string());
        compare_states(&a, &b).into_iter().map(|d| format!("{}: {} | {}", d.path, show(d.a), show(d.b))).collect()
    }

    #[test]
    fn the_innermost_place_is_named() {
        let a = json!({"times": {"h.0.w": 3, "b": 3}, "draws": [1, 2], "scale": 1.0, "same": [{"x": null}]});
        let b =
            json!({"times": {"h.0.w": 4, "b": 3}, "draws": [1, 3, 5], "scale": 1, "same": [{"x": null}], "new": {}});
        assert_eq!(
            places(a, b),
            [
                "draws[1]: 2 | 3",
                "draws[2]: nothing | 5",
                "new: nothing | {}",
                "scale: 1.0 | 1",
                "times.\"h.0.w\": 3 | 4"
            ]
        );
        assert_eq!(places(json!(null), json!([])), [": null | []"]);
        assert_eq!(places(json!({"x": null}), json!({})), ["x: null | nothing"]);
        assert_eq!(places(json!([[0.1]]), json!([[0.1]])), [""; 0]);
    }
}
