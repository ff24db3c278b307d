//! A conversation to the text that the model was trained on: the Jinja template of the model.
//!
//! Rendered as Hugging Face's `apply_chat_template` does: blocks trimmed, `raise_exception`,
//! `strftime_now`, `tojson` as Python writes it, Python's string and dict methods, the special
//! tokens as variables. Bounded: instructions (fuel), recursion, size of the output. A template
//! comes with the model, so it is trusted not to double a variable for ever in memory; what
//! clients send is data to it, never code.

mod python;

use minijinja::{Environment, ErrorKind, UndefinedBehavior, Value as JinjaValue};
use serde_json::Value;
use std::fmt;
use std::io;

/// Instructions of one rendering. A message of SmolLM2's template takes about 20, of the tool
/// templates of Qwen2.5 below 200: enough for 50,000 messages, and over within a second.
const FUEL: u64 = 10_000_000;
/// Depth of macros, includes and nested blocks.
const RECURSION_MAX: usize = 128;
/// Longest text rendered: what the tokenizer takes.
const OUTPUT_BYTES_MAX: usize = crate::tokenizer::TEXT_BYTES_MAX;
/// Longest template read: the longest published ones are below 32 KiB.
const TEMPLATE_BYTES_MAX: usize = 1 << 20;

const NAME: &str = "chat";
const TOOLS_NAME: &str = "chat with tools";

/// A model's chat template, compiled.
pub struct ChatTemplate {
    environment: Environment<'static>,
    source: String,
    has_tool_template: bool,
    special_tokens: Vec<(String, String)>,
}

/// What to render.
#[derive(Clone, Copy, Debug)]
pub struct ChatInput<'a> {
    /// A JSON list of messages, each with `role` and `content` and whatever else the client sent.
    pub messages: &'a Value,
    /// A JSON list of tools, if any.
    pub tools: Option<&'a Value>,
    /// End with the beginning of the assistant's answer.
    pub add_generation_prompt: bool,
    /// More variables of the template (`chat_template_kwargs`), an object.
    pub variables: Option<&'a serde_json::Map<String, Value>>,
    /// Now, in seconds since 1970, for templates that print the date (UTC).
    pub now_unix_s: u64,
}

/// Why a conversation cannot be rendered. All but [`TemplateError::Template`] are the request's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TemplateError {
    /// The template cannot be compiled: a fault of the model's files.
    Template {
        /// What the engine says, with the line.
        problem: String,
    },
    /// The template refused the conversation by `raise_exception`.
    Refused {
        /// What it says.
        message: String,
    },
    /// The template failed on this conversation, e.g. content of a kind it does not know.
    Failed {
        /// What the engine says, with the line.
        problem: String,
    },
    /// Rendering took more than its bound of instructions or nesting.
    TooMuchWork,
    /// The text is longer than its bound.
    TooLong {
        /// The bound in bytes.
        most: usize,
    },
}

impl fmt::Display for TemplateError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TemplateError::Template { problem } => {
                write!(
                    f,
                    "the chat template of the model cannot be used: {problem}"
                )
            }
            TemplateError::Refused { message } => {
                write!(f, "the chat template refuses the messages: {message}")
            }
            TemplateError::Failed { problem } => {
                write!(f, "the chat template cannot render the messages: {problem}")
            }
            TemplateError::TooMuchWork => {
                write!(
                    f,
                    "rendering the messages takes over {FUEL} steps or nests over {RECURSION_MAX} deep"
                )
            }
            TemplateError::TooLong { most } => {
                write!(f, "the rendered messages are longer than {most} bytes")
            }
        }
    }
}

impl std::error::Error for TemplateError {}

impl fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ChatTemplate({} bytes)", self.source.len())
    }
}

impl ChatTemplate {
    /// Compiles a template. `tool_source`: a second one for conversations with tools.
    /// `special_tokens`: variables such as `("bos_token", "<s>")`.
    ///
    /// # Errors
    /// [`TemplateError::Template`].
    pub fn new(
        source: &str,
        tool_source: Option<&str>,
        special_tokens: Vec<(String, String)>,
    ) -> Result<Self, TemplateError> {
        let mut environment = Environment::new();
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_undefined_behavior(UndefinedBehavior::Lenient);
        environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
        environment.set_fuel(Some(FUEL));
        environment.set_recursion_limit(RECURSION_MAX);
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", python::raise_exception);
        environment.add_filter("tojson", python::tojson);
        for (name, source) in [(NAME, Some(source)), (TOOLS_NAME, tool_source)] {
            let Some(source) = source else { continue };
            if source.len() > TEMPLATE_BYTES_MAX {
                let problem = format!(
                    "it has {} bytes, at most {TEMPLATE_BYTES_MAX} are read",
                    source.len()
                );
                return Err(TemplateError::Template { problem });
            }
            environment
                .add_template_owned(name, source.to_owned())
                .map_err(|error| TemplateError::Template {
                    problem: error.to_string(),
                })?;
        }
        let (source, has_tool_template) = (source.to_owned(), tool_source.is_some());
        Ok(Self {
            environment,
            source,
            has_tool_template,
            special_tokens,
        })
    }

    /// The template's text.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Renders a conversation.
    ///
    /// # Errors
    /// [`TemplateError`]; a client's fault (400) but for [`TemplateError::Template`].
    pub fn render(&self, input: &ChatInput<'_>) -> Result<String, TemplateError> {
        let with_tools = self.has_tool_template && input.tools.is_some();
        let name = if with_tools { TOOLS_NAME } else { NAME };
        let template =
            self.environment
                .get_template(name)
                .map_err(|error| TemplateError::Template {
                    problem: error.to_string(),
                })?;
        let mut output = Limited {
            text: Vec::new(),
            overflowed: false,
        };
        let rendered = template.render_captured_to(self.variables(input), &mut output);
        match rendered {
            _ if output.overflowed => Err(TemplateError::TooLong {
                most: OUTPUT_BYTES_MAX,
            }),
            Ok(_) => String::from_utf8(output.text).map_err(|error| TemplateError::Failed {
                problem: error.to_string(),
            }),
            Err(error) => Err(sort_error(&error)),
        }
    }

    fn variables(&self, input: &ChatInput<'_>) -> JinjaValue {
        let mut variables: Vec<(String, JinjaValue)> = Vec::new();
        for (name, token) in &self.special_tokens {
            variables.push((name.clone(), JinjaValue::from(token.as_str())));
        }
        for (name, value) in input.variables.into_iter().flatten() {
            variables.push((name.clone(), JinjaValue::from_serialize(value)));
        }
        // Later entries win: a client's variables cannot replace these.
        let now = input.now_unix_s;
        let strftime_now =
            JinjaValue::from_function(move |format: &str| python::strftime(now, format));
        variables.extend([
            (
                "messages".into(),
                JinjaValue::from_serialize(input.messages),
            ),
            ("tools".into(), JinjaValue::from_serialize(input.tools)),
            ("documents".into(), JinjaValue::from(())),
            (
                "add_generation_prompt".into(),
                JinjaValue::from(input.add_generation_prompt),
            ),
            ("strftime_now".into(), strftime_now),
        ]);
        variables.into_iter().collect()
    }
}

fn sort_error(error: &minijinja::Error) -> TemplateError {
    if error.kind() == ErrorKind::OutOfFuel {
        return TemplateError::TooMuchWork;
    }
    // An error inside a macro or a block comes wrapped.
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(inner) = cause {
        if let Some(refusal) = inner.downcast_ref::<python::Refusal>() {
            return TemplateError::Refused {
                message: refusal.0.clone(),
            };
        }
        if inner
            .downcast_ref::<minijinja::Error>()
            .is_some_and(|e| e.kind() == ErrorKind::OutOfFuel)
        {
            return TemplateError::TooMuchWork;
        }
        cause = inner.source();
    }
    let problem = error.to_string();
    if problem.contains("recursion limit") {
        return TemplateError::TooMuchWork;
    }
    TemplateError::Failed { problem }
}

/// Takes output up to [`OUTPUT_BYTES_MAX`], then fails.
struct Limited {
    text: Vec<u8>,
    overflowed: bool,
}

impl io::Write for Limited {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.text.len() + bytes.len() > OUTPUT_BYTES_MAX {
            self.overflowed = true;
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.text.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn render(source: &str, messages: Value) -> Result<String, TemplateError> {
        let tokens = vec![("bos_token".into(), "<s>".into())];
        let template = ChatTemplate::new(source, None, tokens)?;
        template.render(&ChatInput {
            messages: &messages,
            tools: None,
            add_generation_prompt: true,
            variables: json!({"mode": "short", "messages": "no"}).as_object(),
            now_unix_s: 1_722_000_000,
        })
    }

    #[test]
    fn blocks_are_trimmed_and_variables_set() {
        let source = "{{ bos_token }}\n{%- for m in messages %}\n    {% if m.role == 'user' %}\n[{{ m['content'] | trim }}]\n    {% endif %}\n{% endfor %}{{ mode }}{% if add_generation_prompt %}>{% endif %}";
        let text = render(source, json!([{"role": "user", "content": " <b> "}])).unwrap();
        assert_eq!(text, "<s>[<b>]\nshort>");
    }

    #[test]
    fn python_ways_work() {
        let source = "{{ messages[0].content.strip().split(' ')[-1] }} {{ messages[0].items() | list | length }} {{ messages[0] | tojson }} {{ strftime_now('%d %b %Y') }}";
        let text = render(source, json!([{"role": "user", "content": " a 'é' <b>"}])).unwrap();
        assert_eq!(
            text,
            r#"<b> 2 {"role": "user", "content": " a 'é' <b>"} 26 Jul 2024"#
        );
    }

    #[test]
    fn a_refusal_is_told_apart_from_a_failure() {
        let refusing =
            "{% if messages | length > 1 %}{{ raise_exception('only one message') }}{% endif %}ok";
        assert_eq!(render(refusing, json!([1])).unwrap(), "ok");
        let message = "only one message".to_owned();
        assert_eq!(
            render(refusing, json!([1, 2])),
            Err(TemplateError::Refused { message })
        );
        let failing = "{{ messages[0].content + 'x' }}";
        assert!(matches!(
            render(failing, json!([{"content": []}])),
            Err(TemplateError::Failed { .. })
        ));
        assert!(matches!(
            render("{% for %}", json!([])),
            Err(TemplateError::Template { .. })
        ));
    }

    #[test]
    fn work_and_output_are_bounded() {
        let spin = "{% for a in range(10000) %}{% for b in range(10000) %}{% endfor %}{% endfor %}";
        assert_eq!(render(spin, json!([])), Err(TemplateError::TooMuchWork));
        let thousand = "x".repeat(1000);
        let long = format!("{{% for a in range(10000) %}}{thousand}{{% endfor %}}");
        let too_long = render(&long, json!([]));
        assert!(
            too_long
                == Err(TemplateError::TooLong {
                    most: OUTPUT_BYTES_MAX
                })
        );
        let deep = "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}";
        assert_eq!(render(deep, json!([])), Err(TemplateError::TooMuchWork));
    }

    #[test]
    fn tools_may_have_their_own_template() {
        let template =
            ChatTemplate::new("plain", Some("tools {{ tools | length }}"), vec![]).unwrap();
        let (messages, tools) = (json!([]), json!([{}, {}]));
        let mut input = ChatInput {
            messages: &messages,
            tools: None,
            add_generation_prompt: false,
            variables: None,
            now_unix_s: 0,
        };
        assert_eq!(template.render(&input).unwrap(), "plain");
        input.tools = Some(&tools);
        assert_eq!(template.render(&input).unwrap(), "tools 2");
    }
}
