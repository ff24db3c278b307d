//! What chat templates expect from Python: functions and filters of Hugging Face's renderer.

use minijinja::value::Kwargs;
use minijinja::{Error, ErrorKind, Value};
use serde::Serialize;
use serde_json::ser::{CompactFormatter, Formatter, PrettyFormatter};
use std::fmt;
use std::io;

/// Deepest indentation of `tojson`.
const INDENT_MAX: usize = 16;

/// The message of a `raise_exception`, carried as the source of the engine's error.
#[derive(Debug)]
pub(super) struct Refusal(pub(super) String);

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Refusal {}

pub(super) fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, "raise_exception").with_source(Refusal(message)))
}

/// `json.dumps(value, ensure_ascii=False, indent=...)`: a space behind comma and colon.
pub(super) fn tojson(
    value: &Value,
    indent: Option<usize>,
    options: Kwargs,
) -> Result<Value, Error> {
    let indent = match indent {
        Some(indent) => Some(indent),
        None => options.get::<Option<usize>>("indent")?,
    };
    // Known and without effect here: the text is never escaped for ASCII.
    let _: Option<bool> = options.get("ensure_ascii")?;
    options.assert_all_used()?;
    let mut bytes = Vec::new();
    let written = match indent {
        Some(indent) => {
            let spaces = " ".repeat(indent.min(INDENT_MAX));
            write_json(
                value,
                &mut bytes,
                PrettyFormatter::with_indent(spaces.as_bytes()),
            )
        }
        None => write_json(value, &mut bytes, Spaced(CompactFormatter)),
    };
    let wrong = |problem: String| Error::new(ErrorKind::BadSerialization, problem);
    written.map_err(|error| wrong(error.to_string()))?;
    let text = String::from_utf8(bytes).map_err(|error| wrong(error.to_string()))?;
    Ok(Value::from_safe_string(text))
}

fn write_json<F: Formatter>(
    value: &Value,
    out: &mut Vec<u8>,
    formatter: F,
) -> serde_json::Result<()> {
    value.serialize(&mut serde_json::Serializer::with_formatter(out, formatter))
}

/// Python's separators: `", "` and `": "`.
struct Spaced(CompactFormatter);

impl Formatter for Spaced {
    fn begin_array_value<W: ?Sized + io::Write>(
        &mut self,
        out: &mut W,
        first: bool,
    ) -> io::Result<()> {
        self.0.begin_array_value(out, first)?;
        if first { Ok(()) } else { out.write_all(b" ") }
    }

    fn begin_object_key<W: ?Sized + io::Write>(
        &mut self,
        out: &mut W,
        first: bool,
    ) -> io::Result<()> {
        self.0.begin_object_key(out, first)?;
        if first { Ok(()) } else { out.write_all(b" ") }
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, out: &mut W) -> io::Result<()> {
        out.write_all(b": ")
    }
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = [
    "Sunday",
    "Monday",
    "Tuesday",
    "Wednesday",
    "Thursday",
    "Friday",
    "Saturday",
];

/// `datetime.strftime` in UTC for the directives that templates use; others are an error.
pub(super) fn strftime(unix_s: u64, format: &str) -> Result<String, Error> {
    let days = unix_s / 86_400;
    let (year, month, day) = civil_date(days);
    let (hour, minute, second) = (unix_s / 3600 % 24, unix_s / 60 % 60, unix_s % 60);
    let hour12 = if hour % 12 == 0 { 12 } else { hour % 12 };
    let (month_name, day_name) = (MONTHS[month as usize - 1], DAYS[((days + 4) % 7) as usize]);
    let mut text = String::new();
    let mut characters = format.chars();
    while let Some(character) = characters.next() {
        if character != '%' {
            text.push(character);
            continue;
        }
        match characters.next() {
            Some('Y') => text.push_str(&format!("{year:04}")),
            Some('y') => text.push_str(&format!("{:02}", year % 100)),
            Some('m') => text.push_str(&format!("{month:02}")),
            Some('d') => text.push_str(&format!("{day:02}")),
            Some('B') => text.push_str(month_name),
            Some('b') => text.push_str(&month_name[..3]),
            Some('A') => text.push_str(day_name),
            Some('a') => text.push_str(&day_name[..3]),
            Some('H') => text.push_str(&format!("{hour:02}")),
            Some('I') => text.push_str(&format!("{hour12:02}")),
            Some('M') => text.push_str(&format!("{minute:02}")),
            Some('S') => text.push_str(&format!("{second:02}")),
            Some('p') => text.push_str(if hour < 12 { "AM" } else { "PM" }),
            Some('Z') => text.push_str("UTC"),
            Some('%') => text.push('%'),
            other => {
                let problem = format!("strftime_now does not know %{}", other.unwrap_or(' '));
                return Err(Error::new(ErrorKind::InvalidOperation, problem));
            }
        }
    }
    Ok(text)
}

/// Year, month and day of a number of days since 1970-01-01 (Gregorian, counted in eras of 400
/// years that begin on the first of March).
fn civil_date(days: u64) -> (u64, u64, u64) {
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let march_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * march_month + 2) / 5 + 1;
    let month = if march_month < 10 {
        march_month + 3
    } else {
        march_month - 9
    };
    (era * 400 + year_of_era + u64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_right() {
        assert_eq!(civil_date(0), (1970, 1, 1));
        assert_eq!(civil_date(19_782), (2024, 2, 29));
        assert_eq!(civil_date(20_454), (2026, 1, 1));
        let text = strftime(1_709_210_096, "%A %d %B %Y %H:%M:%S %I%p %y-%m %%").unwrap();
        assert_eq!(text, "Thursday 29 February 2024 12:34:56 12PM 24-02 %");
        assert!(strftime(0, "%Q").is_err());
    }
}
