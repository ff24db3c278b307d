//! The generated checkpoints have the bytes that the fixtures were made from, and load.

use kvserve_model::testing::random_qwen2::{Dtype, RandomQwen2, Sizes};
use kvserve_model::{Architecture, LayerTensor, Model, RopeLayout, TensorId, dequantize_row};

#[path = "common/temp_folder.rs"]
mod temp_folder;
use temp_folder::TempFolder;

const TINY_F32: &str = "c718eabf43fc602523dc1abba06927be26613567c6de2753309820c44f3e0e32";
const TINY_BF16: &str = "535a9c658fd65e0d5e94d2e624fcb0029419b3d83b1411a0f5ffed90abdea55c";
const FULL_BF16: &str = "e5adc0e9524a1be50ae3bdb4fa1bf0ef56a9f58a5cd168d06b4f23f3eded495b";

#[test]
fn tiny_checkpoints_have_the_known_hashes() {
    let folder = TempFolder::new("tiny-hash");
    assert_eq!(RandomQwen2::TINY.write(folder.path()).unwrap(), TINY_F32);
    let bf16 = RandomQwen2 {
        dtype: Dtype::Bf16,
        ..RandomQwen2::TINY
    };
    assert_eq!(bf16.write(folder.path()).unwrap(), TINY_BF16);
}

#[test]
#[ignore = "writes 1 GB; run it when the generator changes"]
fn the_full_checkpoint_has_the_known_hash() {
    let folder = TempFolder::new("full-hash");
    let full = RandomQwen2 {
        sizes: Sizes::FULL,
        dtype: Dtype::Bf16,
        seed: 1,
    };
    assert_eq!(full.write(folder.path()).unwrap(), FULL_BF16);
}

#[test]
fn a_generated_folder_loads_without_tokenizer() {
    let folder = TempFolder::new("tiny-load");
    RandomQwen2::TINY.write(folder.path()).unwrap();
    let model = Model::load(folder.path()).unwrap();
    assert_eq!(model.config.architecture, Architecture::Qwen2);
    assert_eq!(
        (
            model.config.layers,
            model.config.head_dim,
            model.config.vocab
        ),
        (2, 32, 512)
    );
    assert_eq!(
        (model.config.eos.as_slice(), model.config.bos),
        (&[2][..], Some(0))
    );
    assert_eq!(model.rope, RopeLayout::Halves);
    assert!(model.tokenizer.is_none() && model.chat_template.is_none());
    assert_eq!(model.generation.temperature, 0.0);
    let bias = model
        .weights
        .tensor(TensorId::Layer(1, LayerTensor::QueryBias));
    assert_eq!((bias.rows, bias.columns), (1, 128));
    let (head, embedding) = (
        model.weights.tensor(TensorId::Head),
        model.weights.tensor(TensorId::Embedding),
    );
    assert_eq!(
        head.bytes.as_ptr(),
        embedding.bytes.as_ptr(),
        "the head is tied"
    );
    let mut norm = vec![0.0; 128];
    dequantize_row(&model.weights.tensor(TensorId::OutputNorm), 0, &mut norm);
    let mean = norm.iter().sum::<f32>() / 128.0;
    assert!(
        (mean - 1.0).abs() < 0.1,
        "norm weights lie around 1, not {mean}"
    );
}

#[test]
fn both_dtypes_hold_the_same_numbers_and_differ_in_fingerprint() {
    let (one, two) = (TempFolder::new("tiny-a"), TempFolder::new("tiny-b"));
    RandomQwen2::TINY.write(one.path()).unwrap();
    RandomQwen2 {
        dtype: Dtype::Bf16,
        ..RandomQwen2::TINY
    }
    .write(two.path())
    .unwrap();
    let (wide, narrow) = (
        Model::load(one.path()).unwrap(),
        Model::load(two.path()).unwrap(),
    );
    for id in wide.weights.ids() {
        let (a, b) = (wide.weights.tensor(id), narrow.weights.tensor(id));
        let (mut x, mut y) = (vec![0.0; a.columns], vec![0.0; a.columns]);
        for row in 0..a.rows {
            dequantize_row(&a, row, &mut x);
            dequantize_row(&b, row, &mut y);
            let near = |(x, y): (&f32, &f32)| (x - y).abs() <= x.abs() / 256.0;
            assert!(x.iter().zip(&y).all(near), "{} row {row}", a.name);
        }
    }
    assert_ne!(wide.fingerprint, narrow.fingerprint);
    assert_eq!(
        wide.fingerprint,
        Model::load(one.path()).unwrap().fingerprint
    );
}
