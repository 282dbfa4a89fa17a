import sys; sys.path.insert(0,"scratch")
from check import *
import time, statistics as st
def cpu(f):
    s=time.thread_time(); f(); return time.thread_time()-s
def cost(name, build=None, batch=None, pairs=15):
    b,make=ZOO[name]; build=build or b
    torch.manual_seed(0); model=build().train(); torch.manual_seed(0); bare=build().train()
    made=batch or make(); inputs,sig,target=split(made)
    t=time.thread_time(); layers=cut_chain(model,sig,inputs,results_of=results(sig)); made_s=time.thread_time()-t
    weights={n:p.detach().clone().requires_grad_() for n,p in model.named_parameters() if p.requires_grad}
    loss=loss_of(layers,sig)
    def plain():
        torch.manual_seed(0)
        out=sig.call(bare,dict(zip(sig.keys,inputs)))
        l=out.loss if sig.is_mapping else torch.nn.functional.cross_entropy(out,target)
        torch.autograd.grad(l,[p for p in bare.parameters() if p.requires_grad],allow_unused=True)
    comp=StageCompute(layers,vw=VirtualWorkerIndex(0),seed=5,device=CPU,loss=loss,watches_activations=False)
    def one():
        v=comp.forward(Minibatch(1),weights,inputs); comp.loss(Minibatch(1),v,target); comp.backward(Minibatch(1),weights,None)
    plain(); one(); plain(); one()
    pairs_=[(cpu(plain),cpu(one)) for _ in range(pairs)]
    a,b_=[st.median(x) for x in zip(*pairs_)]
    ratio=st.median(x/y for x,y in pairs_)
    # stages
    line=f"{name}: {len(layers)} layers; made in {made_s*1e3:.0f} ms; plain {a*1e3:.1f} ms, one stage {b_*1e3:.1f} ms, rate {ratio:.3f}"
    for k in (2,4):
        if len(layers)<k: continue
        L=len(layers); edges=[L*i//k for i in range(k+1)]
        comps=[StageCompute(layers[x:y],vw=VirtualWorkerIndex(0),seed=5,device=CPU,loss=loss if y==L else None,watches_activations=False) for x,y in zip(edges,edges[1:])]
        parts=[{n:weights[n] for l in layers[x:y] for n in l.parameters.values()} for x,y in zip(edges,edges[1:])]
        tot=[]
        for rep in range(6):
            v=inputs; t=0; s=time.thread_time()
            for c,w in zip(comps,parts): v=c.forward(Minibatch(1),w,v)
            comps[-1].loss(Minibatch(1),v,target); g=None
            for c,w in reversed(list(zip(comps,parts))):
                f=c.backward(Minibatch(1),w,g); g=f.inputs
            tot.append(time.thread_time()-s)
        line+=f"; {k} stages together {st.median(tot)*1e3:.1f} ms"
    print(line, flush=True)
if __name__=="__main__":
    from zoo import lm, lm_batch, tv
    cost("gpt2", lm("gpt2",vocab_size=1000,n_embd=64,n_layer=12,n_head=4,n_positions=300), lm_batch(1000,b=8)(128))
    cost("gpt2", lm("gpt2",vocab_size=2000,n_embd=256,n_layer=12,n_head=4,n_positions=300), lm_batch(1000,b=8)(128), pairs=7)
    cost("t5"); cost("unet"); cost("resnet18"); cost("densenet121", pairs=5)
