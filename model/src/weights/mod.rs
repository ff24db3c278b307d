//! The numbers of a model, where they lie in its files.
//!
//! Files are mapped, never read whole: a [`Weights`] owns the maps and hands out [`TensorView`]s
//! into them. Everything about a tensor (type, shape, place) is checked at load, so that later
//! uses cannot fail. A file that is cut short *while* it is mapped ends the process by SIGBUS:
//! replace model files by rename, never in place.
//!
//! * `tensor`: element types, views, dequantising a row
//! * `table`: which tensors a model has, with which shapes, found and checked by name

mod float;
mod map;
mod table;
mod tensor;

pub use float::{bf16_to_f32, f16_to_f32, f32_to_bf16};
pub use map::MappedFile;
pub use table::{
    LayerTensor, Naming, RopeLayout, StoredTensor, TensorError, TensorId, TensorProblem, Weights,
};
pub use tensor::{TensorType, TensorView, dequantize_row};
