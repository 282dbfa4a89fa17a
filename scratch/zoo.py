import tvfix
"""Small random models: name -> (build, batch(length))"""
import torch
from torch import nn
import torch.nn.functional as F

class UNet(nn.Module):
    def __init__(self, c=8):
        super().__init__()
        def block(i,o): return nn.Sequential(nn.Conv2d(i,o,3,padding=1), nn.BatchNorm2d(o), nn.ReLU(inplace=True), nn.Dropout2d(0.1))
        self.d1=block(3,c); self.d2=block(c,2*c); self.d3=block(2*c,4*c)
        self.u2=block(6*c,2*c); self.u1=block(3*c,c); self.head=nn.Conv2d(c,2,1)
    def forward(self,x):
        a=self.d1(x); b=self.d2(F.max_pool2d(a,2)); y=self.d3(F.max_pool2d(b,2))
        y=self.u2(torch.cat([F.interpolate(y,scale_factor=2),b],1))
        y=self.u1(torch.cat([F.interpolate(y,scale_factor=2),a],1))
        return self.head(y)

def lm(model_type, cls="AutoModelForCausalLM", **over):
    def build():
        import transformers
        config=transformers.AutoConfig.for_model(model_type, **over)
        return getattr(transformers, cls).from_config(config)
    return build
def lm_batch(vocab=100, causal=True, b=4):
    def make(length=12, seed=0):
        g=torch.Generator().manual_seed(seed)
        ids=torch.randint(3,vocab,(b,length),generator=g)
        mask=torch.ones_like(ids); mask[0,-3:]=0
        labels=ids.clone(); labels[mask==0]=-100
        return dict(input_ids=ids, attention_mask=mask, labels=labels)
    return make
def images(b=4,size=32,classes=10,dense=False):
    def make(length=None, seed=0):
        g=torch.Generator().manual_seed(seed)
        return (torch.randn(b,3,size,size,generator=g),), (torch.randint(0,2,(b,size,size),generator=g) if dense else torch.randint(0,classes,(b,),generator=g))
    return make
small=dict(vocab_size=100, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64, max_position_embeddings=64)
def tv(name, **kw):
    def build():
        import torchvision
        return getattr(torchvision.models, name)(num_classes=10, **kw)
    return build
def timm_(name, **kw):
    def build():
        import timm
        return timm.create_model(name, **kw)
    return build
class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb=nn.Embedding(100,32); self.t=nn.Transformer(32,4,2,2,64,batch_first=True); self.head=nn.Linear(32,100,bias=False); self.head.weight=self.emb.weight
    def forward(self, src, tgt):
        m=nn.Transformer.generate_square_subsequent_mask(tgt.shape[1])
        return self.head(self.t(self.emb(src), self.emb(tgt), tgt_mask=m, tgt_is_causal=True))
def tied_batch(length=12, seed=0):
    g=torch.Generator().manual_seed(seed)
    src=torch.randint(0,100,(4,length),generator=g); tgt=torch.randint(0,100,(4,length),generator=g)
    return (src,tgt), tgt
def lora():
    import peft
    m=lm("gpt2",vocab_size=100,n_embd=32,n_layer=3,n_head=4,n_positions=64)()
    return peft.get_peft_model(m, peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=["c_attn"], task_type="CAUSAL_LM"))
def s2s(length=12, seed=0):
    b=lm_batch()(length,seed); b["labels"]=b["labels"][:, :8].contiguous(); return b
def cls_batch(length=12, seed=0):
    b=lm_batch()(length,seed); b["labels"]=torch.tensor([0,1,1,0]); return b
def whisper_batch(length=None, seed=0):
    g=torch.Generator().manual_seed(seed)
    return dict(input_features=torch.randn(2,8,40,generator=g), labels=torch.randint(3,100,(2,length or 7),generator=g))
def vit_batch(length=None, seed=0):
    g=torch.Generator().manual_seed(seed)
    return dict(pixel_values=torch.randn(2,3,32,32,generator=g), labels=torch.randint(0,2,(2,),generator=g))
ZOO={
 "gpt2": (lm("gpt2",vocab_size=100,n_embd=32,n_layer=3,n_head=4,n_positions=300), lm_batch()),
 "t5": (lm("t5","AutoModelForSeq2SeqLM",vocab_size=100,d_model=32,d_kv=8,d_ff=64,num_layers=2,num_heads=4,decoder_start_token_id=0), s2s),
 "densenet121": (tv("densenet121", drop_rate=0.1), images()),
 "unet": (UNet, images(dense=True)),
 "resnet18": (tv("resnet18"), images()),
 "mobilenet_v3": (tv("mobilenet_v3_small"), images()),
 "llama": (lm("llama",**small,num_key_value_heads=2,pad_token_id=0), lm_batch()),
 "qwen2": (lm("qwen2",**small,num_key_value_heads=2), lm_batch()),
 "mistral": (lm("mistral",**small,num_key_value_heads=2,sliding_window=8), lm_batch()),
 "gemma3": (lm("gemma3_text",**small,num_key_value_heads=2,head_dim=8,sliding_window=8,pad_token_id=0), lm_batch()),
 "mixtral": (lm("mixtral",**small,num_key_value_heads=2,num_local_experts=4,num_experts_per_tok=2), lm_batch()),
 "opt": (lm("opt",vocab_size=100,hidden_size=32,num_hidden_layers=3,num_attention_heads=4,ffn_dim=64,max_position_embeddings=64,word_embed_proj_dim=32), lm_batch()),
 "bert": (lm("bert","AutoModelForMaskedLM",**small), lm_batch()),
 "roberta": (lm("roberta","AutoModelForSequenceClassification",**small,num_labels=2), cls_batch),
 "distilbert": (lm("distilbert","AutoModelForMaskedLM",vocab_size=100,dim=32,n_layers=3,n_heads=4,hidden_dim=64,max_position_embeddings=64), lm_batch()),
 "vit": (lm("vit","AutoModelForImageClassification",hidden_size=32,num_hidden_layers=3,num_attention_heads=4,intermediate_size=64,image_size=32,patch_size=8,num_labels=2), vit_batch),
 "whisper": (lm("whisper","AutoModelForSpeechSeq2Seq",vocab_size=100,d_model=32,encoder_layers=2,decoder_layers=2,encoder_attention_heads=4,decoder_attention_heads=4,encoder_ffn_dim=64,decoder_ffn_dim=64,num_mel_bins=8,max_source_positions=20,max_target_positions=32,dropout=0.1,pad_token_id=0,bos_token_id=1,eos_token_id=2,decoder_start_token_id=1,suppress_tokens=None,begin_suppress_tokens=None), whisper_batch),
 "timm_vit": (timm_("vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=32, depth=4, num_heads=4, num_classes=10, drop_path_rate=0.2), images()),
 "transformer": (Tied, tied_batch),
 "lora": (lora, lm_batch()),
}
