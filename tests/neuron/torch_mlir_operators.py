"""Operators that torch-mlir brings to StableHLO, the way of TorchNeuron's compiler (facts, as data); no tests.

The names that lib/Conversion/TorchToStablehlo and lib/Dialect/Torch/Transforms/DecomposeComplexOps.cpp speak of, as of
2026-08-20 (llvm/torch-mlir 0029fc2e102c). That a name stands there does not say that every form of it is taken.
TorchNeuron's own table of operators (docs/torch_api_compatibility.md of aws-neuron/torch-neuronx) could not be had.
"""

from __future__ import annotations

_NAMES = """
    AtenAbs AtenAbsolute AtenAcos AtenAcosh AtenAdaptiveAvgPool1d AtenAdaptiveAvgPool2d AtenAdaptiveMaxPool1d
    AtenAdaptiveMaxPool2d AtenAddInt AtenAdd AtenAddScalar AtenAddTensor AtenAddbmm AtenAddcdiv AtenAddcmul
    AtenAddmm AtenAllDim AtenAll AtenAmax AtenAmin AtenAminmax AtenAnyDim AtenAnyDims AtenAny AtenArange
    AtenArangeStart AtenArangeStartStep AtenArgMax AtenArgMin AtenArgmax AtenArgmin AtenArgsort AtenAsin AtenAsinh
    AtenAtan2 AtenAtan AtenAtanh AtenAtleast1d AtenAtleast2d AtenAvgPool1d AtenAvgPool2d AtenAvgPool3d AtenBaddbmm
    AtenBatchNorm AtenBernoulli AtenBernoulliP AtenBernoulliTensor AtenBilinear AtenBinaryCrossEntropyWithLogits
    AtenBitwiseAndScalar AtenBitwiseAndTensor AtenBitwiseLeftShiftTensor AtenBitwiseNot AtenBitwiseOrTensor
    AtenBitwiseRightShiftTensor AtenBitwiseXorTensor AtenBmm AtenBoolFloat AtenBoolInt AtenBoolTensor
    AtenBroadcastTensors AtenBroadcastTo AtenBucketizeTensor AtenCat AtenCeil AtenCelu AtenChannelShuffle
    AtenClampMax AtenClampMin AtenClampMinTensor AtenClamp AtenClampTensor AtenClone AtenColumnStack
    AtenConstantPadNd AtenContiguous AtenConv1d AtenConv1dPadding AtenConv2d AtenConv2dPadding AtenConv3d
    AtenConv3dPadding AtenConvTbc AtenConvTranspose1d AtenConvTranspose2dInput AtenConvTranspose3dInput
    AtenConvolutionBackward AtenConvolution AtenCopy AtenCopysignTensor AtenCos AtenCosh AtenCosineSimilarity
    AtenCountNonzeroDimIntList AtenCountNonzero AtenCrossEntropyLoss AtenCumprod AtenCumsum AtenDeg2rad
    AtenDequantizeSelf AtenDiagEmbed AtenDiag AtenDiagonal AtenDim AtenDivFloat AtenDiv AtenDivScalarMode
    AtenDivScalar AtenDivTensorMode AtenDivTensor AtenDropout AtenEinsum AtenElu AtenEmbeddingBagPaddingIdx
    AtenEmbedding AtenEmptyLike AtenEmptyMemoryFormat AtenEmptyStrided AtenEqInt AtenEqScalar AtenEqTensor AtenErf
    AtenExp2 AtenExp AtenExpandAs AtenExpand AtenExpm1 AtenExponential AtenEyeM AtenEye
    AtenFakeQuantizePerChannelAffineCachemask AtenFakeQuantizePerChannelAffine
    AtenFakeQuantizePerTensorAffineCachemask AtenFakeQuantizePerTensorAffine
    AtenFakeQuantizePerTensorAffineTensorQparams AtenFftFft AtenFftRfft AtenFillScalar AtenFix AtenFlattenUsingInts
    AtenFlip AtenFliplr AtenFlipud AtenFloatPowerTensorTensor AtenFloatScalar AtenFloatTensor AtenFloorDivide
    AtenFloorDivideScalar AtenFloor AtenFloordivInt AtenFmax AtenFmin AtenFmodTensor AtenFrac AtenFrobeniusNormDim
    AtenFullLike AtenFull AtenGather AtenGeFloat AtenGeScalar AtenGeTensor AtenGeluBackward AtenGelu AtenGlu
    AtenGridSampler AtenGroupNorm AtenGtFloat AtenGtInt AtenGtScalar AtenGtTensor AtenHannWindowPeriodic
    AtenHardshrink AtenHardsigmoid AtenHardswish AtenHardtanh AtenHeaviside AtenHstack AtenIndexPutHackedTwin
    AtenIndexPut AtenIndexSelect AtenIndexTensorHackedTwin AtenIndexTensor AtenInstanceNorm AtenIntBool AtenIntRepr
    AtenIntTensor AtenIsfinite AtenIsinf AtenIsnan AtenIsneginf AtenIsposinf AtenItem AtenKlDiv AtenL1Loss
    AtenLayerNorm AtenLdexpTensor AtenLeScalar AtenLeTensor AtenLeakyReluBackward AtenLeakyRelu AtenLerpScalar
    AtenLerpTensor AtenLiftFreshCopy AtenLinalgCross AtenLinalgDet AtenLinalgNorm AtenLinalgSlogdet
    AtenLinalgVectorNorm AtenLinear AtenLinspace AtenLog10 AtenLog1p AtenLog2 AtenLogCumsumExp AtenLog
    AtenLogSigmoid AtenLogSoftmaxInt AtenLogaddexp2 AtenLogaddexp AtenLogcumsumexp AtenLogicalAnd AtenLogicalNot
    AtenLogicalOr AtenLogicalXor AtenLogit AtenLtInt AtenLtScalar AtenLtTensor AtenMaskedFillScalar
    AtenMaskedFillTensor AtenMaskedScatter AtenMatmul AtenMaxDim AtenMax AtenMaxPool1d AtenMaxPool1dWithIndices
    AtenMaxPool2d AtenMaxPool2dWithIndices AtenMaxPool3d AtenMaximum AtenMeanDim AtenMean AtenMinDim AtenMin
    AtenMinimum AtenMish AtenMm AtenMovedimInt AtenMseLoss AtenMulFloat AtenMulInt AtenMulScalar AtenMulTensor
    AtenMv AtenNanToNum AtenNarrow AtenNarrowTensor AtenNativeBatchNorm AtenNativeDropout AtenNativeGroupNorm
    AtenNativeLayerNorm AtenNeInt AtenNeScalar AtenNeTensor AtenNegFloat AtenNegInt AtenNeg AtenNewEmpty
    AtenNewEmptyStrided AtenNewFull AtenNewOnes AtenNewZeros AtenNllLossForward AtenNonzero AtenNormScalarOptDim
    AtenNormalFunctional AtenNumel AtenNumpyT AtenOneHot AtenOnesLike AtenOnes AtenOuter AtenPad AtenPermute
    AtenPixelShuffle AtenPixelUnshuffle AtenPoissonNllLoss AtenPooling AtenPowScalar AtenPowTensorScalar
    AtenPowTensorTensor AtenPrelu AtenProdDimInt AtenProd AtenQuantizePerChannel AtenQuantizePerTensor AtenRad2deg
    AtenRandLike AtenRand AtenRandintLow AtenRandint AtenRandnGenerator AtenRandnLike AtenRandn AtenReciprocal
    AtenReflectionPad1d AtenReflectionPad2d AtenReflectionPad3d AtenRelu6 AtenRelu AtenRemainderInt
    AtenRemainderScalar AtenRemainderTensor AtenRenorm AtenRepeatInterleaveSelfInt AtenRepeatInterleaveTensor
    AtenRepeat AtenReplicationPad1d AtenReplicationPad2d AtenReplicationPad3d AtenReshapeAs AtenReshape AtenRmsNorm
    AtenRoll AtenRot90 AtenRoundDecimals AtenRound AtenRrelu AtenRreluWithNoiseBackward AtenRreluWithNoiseFunctional
    AtenRreluWithNoise AtenRsqrt AtenRsubScalar AtenScalarImplicit AtenScalarTensor AtenScaledDotProductAttention
    AtenScatterAdd AtenScatterSrc AtenScatterValue AtenSelectInt AtenSelectScatter AtenSelu AtenSgn AtenSigmoid
    AtenSignbit AtenSilu AtenSin AtenSinh AtenSizeInt AtenSize AtenSliceScatter AtenSliceTensor AtenSoftmaxInt
    AtenSoftplus AtenSoftshrink AtenSort AtenSpecialExpm1 AtenSplitWithSizes AtenSqrtInt AtenSqrt AtenSquare
    AtenSqueezeDim AtenSqueeze AtenStack AtenStdCorrection AtenStdDim AtenStd AtenStftCenter AtenSubFloat AtenSubInt
    AtenSub AtenSubScalar AtenSubTensor AtenSumDimIntList AtenSum AtenSymConstrainRangeForSize AtenSymConstrainRange
    AtenT AtenTan AtenTanhBackward AtenTanh AtenTensorInt AtenTensor AtenThreshold AtenTile AtenToDevice
    AtenToDtypeLayout AtenToDtype AtenToPrimDevice AtenTopk AtenTrace AtenTransposeInt AtenTrilIndices AtenTril
    AtenTriuIndices AtenTriu AtenTrunc AtenTypeAs AtenUnflattenInt AtenUniform AtenUnsqueeze
    AtenUpsampleNearest1dVec AtenUpsampleNearest2dVec AtenVarCorrection AtenVarDim AtenVarMeanCorrection
    AtenVarMeanDim AtenVarMean AtenVar AtenViewAsComplex AtenViewDtype AtenView AtenWhereScalar AtenWhereScalarOther
    AtenWhereScalarSelf AtenWhereSelf AtenZero AtenZerosLike AtenZeros Aten_AssertScalar Aten_ConvolutionDeprecated
    Aten_Convolution Aten_EmbeddingBag Aten_FakeQuantizePerTensorAffineCachemaskTensorQparams Aten_IndexPutImpl
    Aten_LinalgDet Aten_LogSoftmaxBackwardData Aten_LogSoftmax Aten_MakePerChannelQuantizedTensor
    Aten_MakePerTensorQuantizedTensor Aten_ReshapeAlias Aten_SafeSoftmax Aten_SoftmaxBackwardData Aten_Softmax
    Aten_ToCopy Aten_Trilinear Aten_UnsafeIndexPutHackedTwin Aten_UnsafeView Aten_WeightNormInterface
    Aten__And__Tensor Aten__InterpolateSizeListScaleList Aten__Not__ Aten__Or__Bool PrimsCollapse
    PrimsConvertElementType PrimsIota PrimsSplitDim PrimsSqrt PrimsSqueeze PrimsSum PrimsVar
"""
CONVERTED = frozenset(_NAMES.split())

DECOMPOSED = frozenset({"aten.split.Tensor", "aten.embedding.default", "aten.silu.default"})
"""What TorchNeuron takes apart before (neuron_dynamo_backend/decompositions.py, as published in 2026)."""


def takes(operator: object) -> bool:
    """Whether an overload, as "aten.sum.dim_IntList", is in the table."""
    name = str(operator)
    space, short, overload = name.split(".")
    inner = "_" if short.startswith("_") else ""
    variant = "" if overload == "default" else _camel(overload)
    return name in DECOMPOSED or f"{space.title()}{inner}{_camel(short.lstrip('_'))}{variant}" in CONVERTED


def _camel(name: str) -> str:
    return "".join(part[:1].upper() + part[1:] for part in name.split("_"))
