//! Which endpoint a method and a path name; shared by the API and the proxy.

use super::error::ApiError;
use super::metrics::Endpoint;
use super::params::Kind;
use hyper::Method;

/// An endpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Route {
    /// `POST /v1/completions`, `POST /v1/chat/completions`.
    Generate(Kind),
    /// `POST /tokenize`.
    Tokenize,
    /// `POST /detokenize`.
    Detokenize,
    /// `GET /v1/models`.
    Models,
    /// `GET /v1/models/{id}`, the id decoded.
    Model(String),
    /// `GET /health`.
    Health,
    /// `GET /ready`.
    Ready,
    /// `GET /progress`.
    Progress,
    /// `GET /metrics`.
    Metrics,
    /// `GET /version`.
    Version,
    /// `GET /nodes/status` (proxy).
    NodesStatus,
    /// `GET /debug/*`, `POST /debug/chaos`.
    Debug,
}

/// First parts of paths that OpenAI, Anthropic or vLLM clients know and nobody serves here.
const UNSUPPORTED: &[&str] = &[
    "/v1/embeddings",
    "/v1/responses",
    "/v1/messages",
    "/v1/rerank",
    "/v2/rerank",
    "/rerank",
    "/v1/score",
    "/score",
    "/pooling",
    "/classify",
    "/v1/moderations",
    "/v1/edits",
    "/v1/images",
    "/v1/audio",
    "/v1/files",
    "/v1/uploads",
    "/v1/batches",
    "/v1/fine_tuning",
    "/v1/fine-tunes",
    "/v1/assistants",
    "/v1/threads",
    "/v1/vector_stores",
    "/v1/realtime",
    "/v1/evals",
    "/v1/conversations",
    "/v1/containers",
    "/v1/videos",
];

impl Route {
    /// Finds the endpoint.
    ///
    /// # Errors
    /// 404, 405 with `Allow`, or 501 for what OpenAI clients know.
    pub fn find(method: &Method, path: &str) -> Result<Route, ApiError> {
        let (route, allow) = match path {
            "/v1/completions" => (Route::Generate(Kind::Completion), "POST"),
            "/v1/chat/completions" => (Route::Generate(Kind::Chat), "POST"),
            "/tokenize" => (Route::Tokenize, "POST"),
            "/detokenize" => (Route::Detokenize, "POST"),
            "/v1/models" => (Route::Models, "GET, HEAD"),
            "/health" => (Route::Health, "GET, HEAD"),
            "/ready" => (Route::Ready, "GET, HEAD"),
            "/progress" => (Route::Progress, "GET, HEAD"),
            "/metrics" => (Route::Metrics, "GET, HEAD"),
            "/version" => (Route::Version, "GET, HEAD"),
            "/nodes/status" => (Route::NodesStatus, "GET, HEAD"),
            "/debug/chaos" => (Route::Debug, "GET, HEAD, POST"),
            _ => match path.strip_prefix("/v1/models/") {
                Some(id) if !id.is_empty() => (Route::Model(percent_decoded(id)), "GET, HEAD"),
                Some(_) | None if path.starts_with("/debug/") => (Route::Debug, "GET, HEAD"),
                Some(_) | None => return Err(not_here(method, path)),
            },
        };
        let is_get = method == Method::GET || method == Method::HEAD;
        let allowed = match allow {
            "POST" => method == Method::POST,
            "GET, HEAD" => is_get,
            _ => is_get || method == Method::POST,
        };
        if allowed {
            Ok(route)
        } else {
            Err(ApiError::wrong_method(method.as_str(), path, allow))
        }
    }

    /// The label in metrics.
    pub fn endpoint(&self) -> Endpoint {
        match self {
            Route::Generate(Kind::Completion) => Endpoint::Completions,
            Route::Generate(Kind::Chat) => Endpoint::Chat,
            Route::Tokenize | Route::Detokenize => Endpoint::Tokenize,
            Route::Models | Route::Model(_) => Endpoint::Models,
            Route::Health
            | Route::Ready
            | Route::Progress
            | Route::Metrics
            | Route::Version
            | Route::NodesStatus
            | Route::Debug => Endpoint::Pages,
        }
    }
}

fn not_here(method: &Method, path: &str) -> ApiError {
    let known = UNSUPPORTED.iter().any(|prefix| {
        path.strip_prefix(prefix)
            .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    });
    if known {
        ApiError::unsupported_endpoint(path)
    } else {
        ApiError::unknown_path(method.as_str(), path)
    }
}

/// Decodes `%41`; what is not such a pair stays as it is.
fn percent_decoded(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, tail)) = rest.split_first() {
        let pair = (first == b'%')
            .then(|| tail.get(..2))
            .flatten()
            .and_then(|pair| std::str::from_utf8(pair).ok())
            .filter(|pair| pair.bytes().all(|byte| byte.is_ascii_hexdigit()))
            .and_then(|pair| u8::from_str_radix(pair, 16).ok());
        match pair {
            Some(byte) => {
                bytes.push(byte);
                rest = &tail[2..];
            }
            None => {
                bytes.push(first);
                rest = tail;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_lead_where_the_table_says() {
        let get = |path| Route::find(&Method::GET, path);
        assert_eq!(
            Route::find(&Method::POST, "/v1/completions").unwrap(),
            Route::Generate(Kind::Completion)
        );
        assert_eq!(
            get("/v1/models/org%2Fname").unwrap(),
            Route::Model("org/name".into())
        );
        assert_eq!(get("/debug/transfers").unwrap(), Route::Debug);
        for (path, status) in [
            ("/nothing", 404),
            ("/v1/models/", 404),
            ("/v1/embeddingsx", 404),
            ("/v1/chat/completions", 405),
            ("/v1/embeddings", 501),
            ("/v1/responses/resp_1/cancel", 501),
        ] {
            assert_eq!(get(path).unwrap_err().status, status, "{path}");
        }
        let wrong = Route::find(&Method::DELETE, "/debug/pages").unwrap_err();
        assert_eq!(
            (wrong.status.as_u16(), wrong.allow),
            (405, Some("GET, HEAD"))
        );
    }

    #[test]
    fn odd_percent_signs_stay() {
        assert_eq!(percent_decoded("a%2"), "a%2");
        assert_eq!(percent_decoded("%zz%41%"), "%zzA%");
        assert_eq!(percent_decoded("%+1"), "%+1");
        assert_eq!(percent_decoded("%ff"), "\u{fffd}");
    }
}
