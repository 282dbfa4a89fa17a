import sys, time, warnings, copy
import torch
warnings.simplefilter("ignore")
sys.path.insert(0,"scratch")
from zoo import ZOO
from hetpipe.pipeline.chain import cut_chain, weights_in_place
from hetpipe.model.cut_model import Signature
from hetpipe.pipeline.compute import StageCompute
from hetpipe.values.ids import Minibatch, VirtualWorkerIndex
torch.set_num_threads(1)
CPU=torch.device("cpu")
def split(made):
    if isinstance(made, dict): return tuple(made.values()), Signature(tuple(made), True), None
    (inputs, target)=made
    return inputs, Signature(tuple(map(str,range(len(inputs)))), False), target
def results(sig):
    return (lambda o: o.loss) if sig.is_mapping else (lambda o: o)
def loss_of(layers, sig):
    cut=layers[0].cut
    if sig.is_mapping: return lambda out, target: cut.output.loss
    def f(out,target):
        o=cut.output
        return torch.nn.functional.cross_entropy(o if o.dim()!=3 else o.flatten(0,1), target if o.dim()!=3 else target.flatten())
    return f
def stages(layers, bounds, weights, batch, target, sig, p=1):
    loss=loss_of(layers,sig)
    edges=[0,*bounds,len(layers)]
    comps=[StageCompute(layers[a:b],vw=VirtualWorkerIndex(0),seed=5,device=CPU,loss=loss if b==len(layers) else None,watches_activations=False) for a,b in zip(edges,edges[1:])]
    parts=[{n:weights[n] for l in layers[a:b] for n in l.parameters.values()} for a,b in zip(edges,edges[1:])]
    values=batch
    for c,w in zip(comps,parts):
        values=tuple(v.detach().clone() for v in c.forward(Minibatch(p),w,values)) if c is not comps[-1] else c.forward(Minibatch(p),w,values)
    value=comps[-1].loss(Minibatch(p),values,target)
    outs=tuple(v.detach().clone() for v in values)
    grads={}; g=None
    for c,w in reversed(list(zip(comps,parts))):
        found=c.backward(Minibatch(p),w,g)
        grads.update(found.weights); g=found.inputs
    return outs,value,grads
def same(a,b):
    if a is None or b is None: return a is b
    return torch.equal(a,b) or bool(((a==b)|(a.isnan()&b.isnan())).all()) if a.shape==b.shape else False
def buffers(layers):
    return {n:layers[0].cut.model.get_buffer(n).clone() for n,_ in layers[0].cut.model.named_buffers()}
def check(name, keep_all=True, lengths=(12,), verbose=True, prep=None, sample=None):
    build,make=ZOO[name]
    torch.manual_seed(0); model=build(); 
    if prep: prep(model)
    model.train()
    torch.manual_seed(0); bare=build(); 
    if prep: prep(bare)
    bare.train()
    inputs,sig,target=split(make(12) if make.__code__.co_argcount and name not in("whisper","vit") else make())
    t=time.time()
    layers=cut_chain(model,sig,inputs,results_of=results(sig),keep_all=keep_all)
    took=time.time()-t
    cut=layers[0].cut
    bad={}
    for c in cut.cuts:
        if c.reason: bad[c.reason]=bad.get(c.reason,0)+1
    weights={n:p.detach().clone().requires_grad_() for n,p in model.named_parameters() if p.requires_grad}
    start=buffers(layers)
    def reset():
        for n,b in model.named_buffers(): b.data.copy_(start[n])
    # bare versus whole, unseeded
    import hetpipe.pipeline.compute as C
    real=C.seed_generators
    inputs,sig,target=split(make(12) if name not in("whisper","vit") else make())
    C.seed_generators=lambda *a: None
    import hetpipe.pipeline.chain as CH, numpy; B=CH._boundary; CH._boundary=lambda v: v; numpy.random.seed(3)
    torch.manual_seed(3); import random; random.seed(3)
    whole=stages(layers,[],weights,inputs,target,sig)
    C.seed_generators=real; CH._boundary=B
    torch.manual_seed(3); random.seed(3); numpy.random.seed(3)
    out=sig.call(bare,dict(zip(sig.keys,(v.clone() for v in inputs))))
    class O: pass
    if sig.is_mapping: l=out.loss
    else: l=torch.nn.functional.cross_entropy(out if out.dim()!=3 else out.flatten(0,1), target if out.dim()!=3 else target.flatten())
    l.backward()
    gb={n:p.grad for n,p in bare.named_parameters() if p.requires_grad}
    diff=[n for n in gb if not same(gb[n],whole[2].get(n))]
    print(f"{name}: {len(layers)} layers of {len(cut.cuts)} places, forbidden {bad}, made in {took:.2f}s; bare==whole: loss {float(l)==whole[1]} grads {len(gb)-len(diff)}/{len(gb)} {diff[:2]}")
    failures=0
    for length in lengths:
        inputs,sig,target=split(make(length))
        reset(); whole=stages(layers,[],weights,inputs,target,sig); bw=buffers(layers)
        cuts=[[i] for i in range(1,len(layers))]+([list(range(1,len(layers)))] if len(layers)>1 else [])
        if sample and len(cuts)>sample:
            step=len(cuts)/sample; cuts=[cuts[int(i*step)] for i in range(sample)]+[cuts[-1]]
        for bounds in cuts:
            reset()
            try:
                got=stages(layers,bounds,weights,inputs,target,sig); bg=buffers(layers)
                wrong=[n for n in whole[2] if not same(whole[2][n],got[2][n])]
                ob=len(whole[0])==len(got[0]) and all(same(a,b) for a,b in zip(whole[0][:1] ,got[0][:1]))
                bb=[n for n in bw if not same(bw[n],bg[n])]
                if whole[1]!=got[1] or wrong or not ob or bb:
                    failures+=1
                    if failures<4: print("  DIFF at",bounds if len(bounds)<5 else "all",cut.border(bounds[0]).label,"len",length,whole[1],got[1],ob,wrong[:3],len(wrong),bb[:2])
            except Exception as e:
                failures+=1
                if failures<4:
                    import traceback
                    print("  ERROR at",bounds if len(bounds)<5 else "all",cut.border(bounds[0]).label,type(e).__name__,str(e)[:300])
                    if verbose: traceback.print_exc(limit=-6)
    print(f"  {failures} failures over {len(cuts)*len(lengths)} cuttings")
    return layers
if __name__=="__main__":
    sample=None
    for n in sys.argv[1:]:
        if n.isdigit(): sample=int(n); continue
        try: check(n, sample=sample)
        except Exception:
            import traceback; traceback.print_exc()
